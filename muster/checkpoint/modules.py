"""The modules of a checkpoint: what each is stored as and what it weighs, from a claim or from files."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from types import MappingProxyType

from muster.checkpoint.claimcheck import names_single_experts
from muster.checkpoint.claimed import Claims
from muster.checkpoint.header import BITS
from muster.checkpoint.index import TensorEntry
from muster.checkpoint.kinds import Kind, Places
from muster.checkpoint.names import Names, grouped, ranges
from muster.checkpoint.quant import Stored, Survey
from muster.checkpoint.spec import Activations, ModelSpec
from muster.checkpoint.storage import Layout, expected
from muster.formats.dialects import Dialect
from muster.formats.spec import Format


@dataclass(frozen=True)
class Module:
    """One module, or the same projection of a layer's experts that are stored alike.

    Attributes:
        name: its name; `*` or ranges stand for the experts' numbers.
        kind: the part of the model it belongs to.
        layer: the decoder layer; draft layers count on from the depth; None outside layers.
        draft: it belongs to the draft (MTP) part.
        stored: the format's name, or the dtype in lower case.
        format, dialect: None where the module holds no matrix (norms, lone tensors).
        activations: what the checkpoint's scheme does to its input.
        shape: logical shape of one of its matrices, `[N, K]` or `[E, N, K]`.
        count: how many are alike.
        parameters: weights and biases of all of them, scales left out.
        tensors, nbytes: all tensors of all of them, scales included.
    """

    name: str
    kind: Kind
    layer: int | None
    draft: bool
    stored: str
    format: Format | None
    dialect: Dialect | None
    activations: Activations
    shape: tuple[int, ...]
    count: int
    parameters: int
    tensors: int
    nbytes: int

    @property
    def scheme(self) -> str:
        """Bits of weights and inputs, as in `W4A16`; empty where there is no matrix."""
        if self.format is None:
            return ""
        bits = self.format.element.bits
        return f"W{bits}A{bits if self.activations != 'none' else max(bits, 16)}"


class _Shelf:
    """Modules by name, each put in its place as its tensors come."""

    def __init__(self, spec: ModelSpec) -> None:
        self._places = Places(Names(spec))
        self.modules: dict[str, Module] = {}

    def matrix(
        self,
        name: str,
        how: tuple[Dialect, Format, Activations],
        shape: tuple[int, ...],
        *,
        count: int,
        tensors: int,
        nbytes: int,
    ) -> None:
        """Adds `count` matrices; `tensors` and `nbytes` are those of all."""
        dialect, format, activations = how
        place = self._places.of(name)
        size = count * prod(shape)
        self.modules[name] = Module(
            name, *place, format.name, format, dialect, activations, shape, count, size, tensors, nbytes
        )

    def tensor(self, module: str, part: str, dtype: str, shape: tuple[int, ...], nbytes: int) -> None:
        """Adds a tensor that is part of no matrix: to its module where that is known, else as one of its own."""
        size = prod(shape) if shape else 0
        known = self.modules.get(module)
        if known is not None:
            self.modules[module] = replace(
                known,
                parameters=known.parameters + size,
                tensors=known.tensors + 1,
                nbytes=known.nbytes + nbytes,
            )
            return
        name = module if part in ("", "weight", "bias") else f"{module}.{part}"
        place = self._places.of(name)
        self.modules[name] = Module(name, *place, dtype.lower(), None, None, "none", shape, 1, size, 1, nbytes)


def claimed_modules(spec: ModelSpec, layout: Layout) -> Mapping[str, Module]:
    """The modules of a checkpoint as its config claims them; errors as `storage.expected`."""
    shelf = _Shelf(spec)
    for one in expected(spec, layout):
        parameter = one.parameter
        nbytes = sum(prod(header.shape) * BITS[header.dtype] // 8 for header in one.tensors)
        if one.dialect is None or one.format is None:
            shelf.tensor(parameter.module, parameter.part, one.tensors[0].dtype, parameter.shape, nbytes)
        else:
            count = parameter.count
            sums = {"count": count, "tensors": count * len(one.tensors), "nbytes": count * nbytes}
            shelf.matrix(parameter.module, (one.dialect, one.format, one.activations), parameter.shape, **sums)
    return MappingProxyType(shelf.modules)


def stored_modules(found: Survey, spec: ModelSpec) -> Mapping[str, Module]:
    """The modules that files hold; experts that are stored alike together."""
    shelf = _Shelf(spec)
    inputs = _Inputs(spec)
    alike: dict[tuple[str, str, int, str], list[str]] = {}
    for name, stored in found.modules.items():
        head, _, tail = name.partition(".experts.")
        number, _, matrix = tail.partition(".")
        if number.isdecimal():
            own = inputs.of(name, stored) if inputs.by_expert else ""
            alike.setdefault((head, matrix, stored.likeness, own), []).append(name)
        else:
            _put(shelf, name, stored, inputs, 1)
    kinds = Counter((head, matrix) for head, matrix, *_ in alike)
    for (head, matrix, *_), names in alike.items():
        which = "*"
        if kinds[head, matrix] > 1:
            which = f"{{{ranges(sorted(int(_NUMBER.findall(name)[-1]) for name in names))}}}"
        _put(shelf, f"{head}.experts.{which}.{matrix}", found.modules[names[0]], inputs, len(names), names[0])
    for entry in found.others:
        _put_tensor(shelf, entry)
    return MappingProxyType(shelf.modules)


_NUMBER = re.compile(r"(?<=\.experts\.)[0-9]+(?=\.)")


def _put(shelf: _Shelf, name: str, stored: Stored, inputs: _Inputs, count: int, example: str = "") -> None:
    how = (stored.dialect, stored.format, inputs.of(example or name, stored))
    sums = {"count": count, "tensors": count * len(stored.parts), "nbytes": count * stored.nbytes}
    shelf.matrix(name, how, stored.shape, **sums)


def _put_tensor(shelf: _Shelf, entry: TensorEntry) -> None:
    module, _, part = entry.name.rpartition(".")
    shelf.tensor(module, part, entry.dtype, entry.shape, entry.nbytes)


def unscaled_inputs(found: Survey, spec: ModelSpec) -> tuple[str, ...]:
    """A line where the config claims quantised inputs and the files lack the scales that these need."""
    if spec.quant is None:
        return ()
    inputs = _Inputs(spec)
    kinds: dict[tuple[str, str, int], list[str]] = {}
    for name, stored in found.modules.items():
        if stored.format.quantised:
            head, _, tail = name.partition(".experts.")
            matrix = name if inputs.by_expert else tail.partition(".")[2]
            kinds.setdefault((head, matrix, stored.likeness), []).append(name)
    lacking = [
        name for names in kinds.values() if inputs.lack_scales(names[0], found.modules[names[0]]) for name in names
    ]
    if not lacking:
        return ()
    listed = ", ".join(grouped(lacking, "modules")[:3])
    return (f"{spec.quant.source}: quantised inputs claimed for {listed}; no scale of theirs is stored",)


class _Inputs:
    """What happens to each module's input: as the scheme says, if it speaks of the format that is stored.

    Attributes:
        by_expert: the scheme tells the experts of a layer apart.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self._claims = Claims(spec.quant) if spec.quant is not None else None
        self.by_expert = spec.quant is not None and names_single_experts(spec.quant)

    def lack_scales(self, module: str, stored: Stored) -> bool:
        """Whether the scheme quantises inputs by a stored scale and there is none."""
        claimed = self._claims.of(module) if self._claims is not None else None
        return (
            claimed is not None
            and (claimed.format, claimed.activations) == (stored.format.name, "static")
            and not _has_input_scale(stored)
        )

    def of(self, module: str, stored: Stored) -> Activations:
        """The activations of a stored matrix; the scale that `static` schemes need must be there for it."""
        if not stored.format.quantised:
            return "none"
        claimed = self._claims.of(module) if self._claims is not None else None
        if claimed is None or claimed.format != stored.format.name:
            return "static" if _has_input_scale(stored) else "none"
        return "none" if self.lack_scales(module, stored) else claimed.activations


def _has_input_scale(stored: Stored) -> bool:
    return "input_scale" in stored.parts or "input_global_scale" in stored.parts
