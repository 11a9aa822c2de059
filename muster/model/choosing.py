"""Who runs what, chosen by declared facts alone: for a model that is loaded without a plan."""

from __future__ import annotations

from typing import Any

from muster.device import Device
from muster.gemm.registry import linears
from muster.moe.registry import backends
from muster.plan import Choice, Choose, Role, by_facts


def unproven(device: Device, moe_backend: str | None = None) -> Choose:
    """Chooses among the registered backends; `moe_backend` names the one for the experts.

    The function it returns raises UsageError where no backend can run a problem, or `moe_backend` cannot.
    """

    def choose(role: Role, problem: Any) -> Choice:
        if role is Role.LINEARS:
            return by_facts(linears(), problem, device, kind="linear")
        return by_facts(backends(), problem, device, moe_backend, kind="expert-layer")

    return choose
