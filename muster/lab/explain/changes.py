"""What a change of formats would save: the same step with some modules, the cache or the states stored otherwise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from math import prod

from muster.checkpoint.inventory import Inventory, Module
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import AttentionSpec, GatedDelta
from muster.formats.spec import FP8_TENSOR, NVFP4, Format
from muster.lab.explain.gpus import Gpu
from muster.lab.explain.limit import limit
from muster.lab.explain.split import Split, share
from muster.lab.explain.traffic import Step

_NARROW = 128
"""Matrices with fewer rows or columns stay as they are: they are cheap to read and costly in accuracy."""

_ATTENTION = (Kind.ATTENTION, Kind.DELTA, Kind.INDEXER)

Setting = tuple[Inventory, Step]


@dataclass(frozen=True)
class Change:
    """One change and what it is worth.

    Attributes:
        name: what is changed, and into what.
        seconds: the step's limit with it.
        saved: seconds that the step's limit loses.
        memory: bytes of weights that the fullest GPU no longer holds.
    """

    name: str
    seconds: float
    saved: float
    memory: float


def changes(inventory: Inventory, split: Split, step: Step, gpu: Gpu) -> tuple[Change, ...]:
    """Every change that does something for this step, the one that saves most first, then all of them together.

    Where two change the same modules only the larger counts in the sum.
    """
    before = limit(inventory, split, step, gpu).seconds
    held = _held(inventory, split)

    def worth(name: str, setting: Setting) -> Change:
        changed, changed_step = setting
        seconds = limit(changed, split, changed_step, gpu).seconds
        return Change(name, seconds, before - seconds, held - _held(changed, split))

    found = [worth(name, change((inventory, step))) for name, change in _proposals(inventory, step)]
    useful = sorted((one for one in found if one.saved > 1e-4 * before), key=lambda one: -one.saved)
    if len(useful) < 2:
        return tuple(useful)
    names = {one.name for one in useful}
    setting = inventory, step
    for name, change in _proposals(inventory, step):
        setting = change(setting) if name in names else setting
    return (*useful, worth("all of these", setting))


def _proposals(inventory: Inventory, step: Step) -> Iterator[tuple[str, Callable[[Setting], Setting]]]:
    yield "attention projections in FP8", _stored(_ATTENTION, FP8_TENSOR)
    yield "shared experts and dense layers in FP8", _stored((Kind.SHARED, Kind.DENSE), FP8_TENSOR)
    yield "output head in FP8", _stored((Kind.HEAD,), FP8_TENSOR)
    yield "output head in NVFP4", _stored((Kind.HEAD,), NVFP4)
    yield "routed experts in NVFP4", _stored((Kind.ROUTED,), NVFP4)
    if step.cache == "bf16" and step.past:
        yield "cache in FP8", lambda setting: (setting[0], replace(setting[1], cache="fp8"))
    if any(isinstance(layer.attention, GatedDelta) for layer in inventory.spec.layers):
        yield "states in BF16", lambda setting: (_narrow_states(setting[0]), setting[1])


def _stored(kinds: Iterable[Kind], format: Format) -> Callable[[Setting], Setting]:
    """The change that stores matrices of these kinds in a narrower format, with inputs quantised like the weights."""
    chosen = frozenset(kinds)

    def change(setting: Setting) -> Setting:
        inventory, step = setting
        modules = {
            name: _module(module, format) if module.kind in chosen and _narrows(module, format) else module
            for name, module in inventory.modules.items()
        }
        return replace(inventory, modules=modules), step

    return change


def _narrows(module: Module, format: Format) -> bool:
    wide = module.format is not None and module.format.element.bits > format.element.bits
    return wide and not module.draft and len(module.shape) >= 2 and min(module.shape[-2:]) >= _NARROW


def _module(module: Module, format: Format) -> Module:
    *stack, rows, columns = module.shape
    matrices = prod(stack) * module.count
    weights = matrices * rows * columns
    wide = module.format.bytes(rows, columns) if module.format is not None else 0
    rest = max(0, module.nbytes - matrices * wide)
    nbytes = matrices * format.bytes(rows, columns) + rest
    assert weights <= module.parameters, module
    return replace(module, stored=format.name, format=format, activations="dynamic", nbytes=nbytes)


def _narrow_states(inventory: Inventory) -> Inventory:
    def narrow(attention: AttentionSpec) -> AttentionSpec:
        return replace(attention, state_dtype="bf16") if isinstance(attention, GatedDelta) else attention

    layers = tuple(replace(layer, attention=narrow(layer.attention)) for layer in inventory.spec.layers)
    return replace(inventory, spec=replace(inventory.spec, layers=layers))


def _held(inventory: Inventory, split: Split) -> float:
    return float(sum(module.nbytes * share(module, inventory.spec, split) for module in inventory.modules.values()))
