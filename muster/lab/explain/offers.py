"""Which backends could compute a part on a device: those that have an adapter, and those that are only known."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from muster.contract import FUSED_FUNC, LINEAR, RUNNER_CORE, Known, Package
from muster.device import Device
from muster.errors import UsageError
from muster.formats.rounding import Grid, Rounding
from muster.gemm import known as known_linears
from muster.lab.prove.contender import Contender, contenders, registry_of
from muster.lab.prove.parts import Part, Role
from muster.moe import known as known_experts
from muster.moe.backend import FusedFunc, RunnerCore

BROKEN = "broken plug-in"

_INPUT_BITS: Mapping[Grid, int] = MappingProxyType(
    {Grid.NVFP4: 4, Grid.FP8_TENSOR: 8, Grid.FP8_TOKEN: 8, Grid.FP8_GROUP: 8, Grid.MXFP8: 8}
)


@dataclass(frozen=True)
class Offer:
    """A backend on a part.

    Attributes:
        backend: its name.
        kind: what it is.
        adapter: it can be run from here, as far as its facts go; False: it is only known.
        reasons: every reason against it, besides the lack of an adapter; none: its facts allow it.
        scheme: bits of the weights and inputs that it multiplies, as in `W4A16`; empty when there are reasons.
        reads: it knows the weights' format, on some device.
        needs: packages and whatever else it needs; of what is only known, those of the kernel that could.
    """

    backend: str
    kind: str
    adapter: bool
    reasons: tuple[str, ...] = ()
    scheme: str = ""
    reads: bool = True
    needs: tuple[str, ...] = ()

    @property
    def possible(self) -> bool:
        """Whether nothing but the lack of an adapter stands against it."""
        return not self.reasons

    @property
    def runs(self) -> bool:
        """Whether it can be run."""
        return self.adapter and self.possible


def offers(part: Part, device: Device) -> tuple[Offer, ...]:
    """Every backend of the part's kind, those with an adapter first."""
    adapters = (_adapter(contender) for contender in contenders(part, device))
    return (*adapters, *(_known(entry, part, device) for entry in known(part.role)))


def known(role: Role) -> tuple[Known[Any], ...]:
    """The backends for a role that have no adapter: a plug-in that registers one of their names takes it over."""
    table: tuple[Known[Any], ...] = known_linears.BACKENDS if role is Role.LINEARS else known_experts.BACKENDS
    here = set(registry_of(role).names())
    return tuple(entry for entry in table if entry.name not in here)


def _adapter(contender: Contender) -> Offer:
    part, name = contender.part, contender.backend
    try:
        backend = registry_of(part.role).get(name)
    except UsageError:
        return Offer(name, BROKEN, True, contender.reasons)
    facts = backend.facts
    return Offer(
        name,
        FUSED_FUNC if isinstance(backend, FusedFunc) else RUNNER_CORE if isinstance(backend, RunnerCore) else LINEAR,
        True,
        contender.reasons,
        "" if contender.reasons else _scheme(part, facts.rounding),
        part.problem.weights.family in facts.weights,
        _names(facts.packages),
    )


def _known(entry: Known[Any], part: Part, device: Device) -> Offer:
    reasons = entry.obstacles(part.problem, device, draft=part.role is Role.DRAFT)
    path = None if reasons else entry.path(part.problem, device)
    if path is None:
        reads = any(part.problem.weights.family in path.weights for path in entry.paths)
        return Offer(entry.name, entry.kind, False, reasons, reads=reads)
    needs = (*_names(path.packages), *entry.needs)
    return Offer(entry.name, entry.kind, False, scheme=_scheme(part, path.rounding), needs=needs)


def _names(packages: Iterable[Package]) -> tuple[str, ...]:
    return tuple(package.name + package.versions for package in packages)


def _scheme(part: Part, rounding: Rounding) -> str:
    inputs = 32 if part.problem.dtype == "f32" else 16
    return f"W{part.problem.weights.element.bits}A{_INPUT_BITS.get(rounding.input, inputs)}"
