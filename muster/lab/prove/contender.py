"""A backend that could compute a part: whether it can here, and up to how many tokens it is meant to."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from muster.contract import Registry, missing_packages
from muster.device import Device
from muster.errors import UsageError
from muster.gemm.backend import LinearFacts
from muster.gemm.registry import linears
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.cases import Part, Role
from muster.moe.backend import Facts
from muster.moe.registry import backends


@dataclass(frozen=True)
class Contender:
    """A registered backend of the part's kind.

    Attributes:
        part: what is to be computed.
        backend: its name.
        refusal: DECLINED or MISSING (only packages stand in the way); None when it says that it can.
        reasons: all of them, when there is a refusal.
        max_tokens: the largest T it is meant for; None: any.
        layout: those of the same one share a copy of the weights; empty: it has its own.
    """

    part: Part
    backend: str
    refusal: Verdict | None = None
    reasons: tuple[str, ...] = ()
    max_tokens: int | None = None
    layout: str = ""

    def meant_for(self, tokens: int) -> bool:
        """Whether a call of that many tokens is within what it is meant for."""
        return self.max_tokens is None or tokens <= self.max_tokens


def registry_of(role: Role) -> Registry[Any]:
    """The registry that holds the backends of a role."""
    return linears() if role is Role.LINEARS else backends()


def contenders(part: Part, device: Device, names: Collection[str] | None = None) -> tuple[Contender, ...]:
    """Every registered backend of the part's kind, or those of them in `names`."""
    known = registry_of(part.role).names()
    return tuple(_contender(part, device, name) for name in known if names is None or name in names)


def _layout(facts: Facts | LinearFacts) -> str:
    return facts.layout if isinstance(facts, Facts) else ""


def _contender(part: Part, device: Device, name: str) -> Contender:
    """A plug-in that cannot be loaded declines: it is one reader's fault and must not stop the others."""
    try:
        backend = registry_of(part.role).get(name)
    except UsageError as error:
        return Contender(part, name, Verdict.DECLINED, (" ".join(str(error).split()),))
    decline = backend.supports(part.problem, device)
    if decline is None:
        return Contender(part, name, max_tokens=backend.facts.max_tokens, layout=_layout(backend.facts))
    only_packages = set(decline.reasons) <= set(missing_packages(backend.facts.packages))
    return Contender(part, name, Verdict.MISSING if only_packages else Verdict.DECLINED, decline.reasons)
