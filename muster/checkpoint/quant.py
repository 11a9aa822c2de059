"""What is stored how: decided from the tensors, then held against the config's claim."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from muster.checkpoint.claimcheck import compare
from muster.checkpoint.index import CheckpointIndex, TensorEntry
from muster.checkpoint.names import grouped
from muster.checkpoint.spec import ModelSpec
from muster.errors import CheckpointError, FormatError
from muster.formats.dialects import Dialect, detect, format_of, shape_of
from muster.formats.spec import Format


class Stored(NamedTuple):
    """One weight matrix, or a stack of them, as stored.

    Attributes:
        dialect: how its tensors are spelled.
        format: what their bits mean.
        shape: the logical shape `[..., N, K]`.
        parts: tensor names by part (`weight`, `weight_scale`, ...).
        nbytes: bytes of its tensors.
        likeness: a number that matrices share whose parts, dtypes and shapes are the same.
    """

    dialect: Dialect
    format: Format
    shape: tuple[int, ...]
    parts: Mapping[str, str]
    nbytes: int
    likeness: int


@dataclass(frozen=True)
class Survey:
    """What is stored how, and where the config says otherwise.

    Attributes:
        modules: every matrix of two or more axes by its module's name; stacked experts (`experts.gate_up_proj`) and
            gpt-oss's are modules of their own.
        disagreements: one line for each kind of difference between the config's claim and the tensors, which win.
        notes: the same for differences that published checkpoints are known to have without harm.
        others: the tensors that are part of no matrix (norms, biases, lone vectors).
    """

    modules: Mapping[str, Stored]
    disagreements: tuple[str, ...]
    notes: tuple[str, ...]
    others: tuple[TensorEntry, ...] = ()


def survey(index: CheckpointIndex, spec: ModelSpec) -> Survey:
    """What every matrix of a checkpoint is stored as; headers are enough.

    Raises:
        CheckpointError: modules whose tensors fit no dialect (a missing scale, an unknown dtype) or two at once;
            all of them.
        ConfigError: a pattern of the config that is no regular expression.
    """
    gptq_v2 = spec.quant is not None and spec.quant.packing == "gptq_v2"
    modules: dict[str, Stored] = {}
    wrong: dict[tuple[str, str], list[str]] = {}
    known: dict[tuple[tuple[str, str, tuple[int, ...]], ...], _Kind | _Fault] = {}
    collected, others = _collect(index.tensors.values())
    for module, parts in collected.items():
        signature = tuple([(part, entry.dtype, entry.shape) for part, entry in parts.items()])
        kind = known.get(signature)
        if kind is None:
            kind = known[signature] = _identify(parts, gptq_v2, len(known))
        if isinstance(kind, _Kind):
            dialect, format, shape, nbytes, likeness = kind
            names = {part: entry.name for part, entry in parts.items()}
            modules[module] = Stored(dialect, format, shape, names, nbytes, likeness)
        elif kind.found:
            wrong.setdefault((kind.found, kind.expected), []).append(module)
        else:
            others += parts.values()
    problems = [
        CheckpointError(name, found=found, expected=expected)
        for (found, expected), names in wrong.items()
        for name in grouped(names, "modules")
    ]
    error = CheckpointError.gather(f"checkpoint {index.directory}: stored matrices", problems)
    if error is not None:
        raise error
    disagreements, notes = compare({name: stored.format for name, stored in modules.items()}, spec)
    return Survey(MappingProxyType(modules), disagreements, notes, tuple(others))


class _Kind(NamedTuple):
    dialect: Dialect
    format: Format
    shape: tuple[int, ...]
    nbytes: int
    likeness: int


class _Fault(NamedTuple):
    """Why tensors make no matrix; `found` is empty where they need not (norms, biases)."""

    found: str = ""
    expected: str = ""


_DOTTED = {part.name for dialect in Dialect if dialect is not Dialect.GPT_OSS_MXFP4 for part in dialect.parts}

_STACKED = {
    "_blocks": "blocks",
    "_scales": "scales",
    "_packed": "weight_packed",
    "_scale": "weight_scale",
    "_scale_2": "weight_scale_2",
    "_scale_inv": "weight_scale_inv",
    "_global_scale": "weight_global_scale",
    "_input_scale": "input_scale",
    "_input_global_scale": "input_global_scale",
    "": "weight",
}
"""Parts of stacked experts, whose tensors hang on the module's name without a dot."""

_STACKED_NAME = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj|gate_proj|up_proj|w13|w1|w2|w3))(_\w+)?")


def _collect(entries: Iterable[TensorEntry]) -> tuple[dict[str, dict[str, TensorEntry]], list[TensorEntry]]:
    """The tensors of each module, by part; and those whose names are no part of a matrix."""
    modules: dict[str, dict[str, TensorEntry]] = {}
    others: list[TensorEntry] = []
    for entry in entries:
        module, _, part = entry.name.rpartition(".")
        if part not in _DOTTED:
            stacked = _STACKED_NAME.fullmatch(entry.name) if ".experts." in entry.name else None
            suffix = stacked[2] or "" if stacked else None
            if stacked is None or suffix not in _STACKED:
                others.append(entry)
                continue
            module, part = stacked[1], _STACKED[suffix]
        parts = modules.get(module)
        if parts is None:
            modules[module] = {part: entry}
        else:
            parts[part] = entry
    return modules, others


def _identify(parts: Mapping[str, TensorEntry], gptq_v2: bool, likeness: int) -> _Kind | _Fault:
    if parts.keys() == {"weight"} and len(parts["weight"].shape) < 2:
        return _Fault()
    dialect = detect(parts)
    if dialect is None:
        return _diagnose(parts)
    if dialect is Dialect.GPTQ and gptq_v2:
        dialect = Dialect.GPTQ_V2
    try:
        nbytes = sum(entry.nbytes for entry in parts.values())
        return _Kind(dialect, format_of(dialect, parts), shape_of(dialect, parts), nbytes, likeness)
    except (FormatError, ValueError, IndexError) as error:
        shapes = ", ".join(f"{part} {list(entry.shape)}" for part, entry in parts.items())
        return _Fault(f"{shapes} ({error})", f"the shapes of {dialect.value}")


def _diagnose(parts: Mapping[str, TensorEntry]) -> _Fault:
    """Why no dialect has these tensors: two dialects at once, a part missing, or a dtype that none has."""
    listed = ", ".join(f"{part} {entry.dtype}" for part, entry in parts.items())
    whole = [dialect for dialect in Dialect if _fits(dialect, parts)]
    if whole and not any(parts.keys() <= _part_names(dialect) for dialect in whole):
        return _Fault(f"tensors of two dialects: {listed}", f"those of {whole[0].value} alone")
    best = max(_likeness(dialect, parts) for dialect in Dialect)
    likely = [dialect for dialect in Dialect if _likeness(dialect, parts) == best]
    missing = [", ".join(_missing(dialect, parts)) for dialect in likely]
    if best > 0 and all(missing):
        expected = " or ".join(dialect.value for dialect in likely)
        return _Fault(f"{listed} without {' or '.join(dict.fromkeys(missing))}", f"all tensors of {expected}")
    return _Fault(listed, _accepted(likely[0]))


def _fits(dialect: Dialect, parts: Mapping[str, TensorEntry]) -> bool:
    """Whether the required tensors are there with a dtype of the dialect."""
    return all(part.name in parts and parts[part.name].dtype in part.dtypes for part in dialect.parts if part.required)


def _likeness(dialect: Dialect, parts: Mapping[str, TensorEntry]) -> int:
    """How many tensors look like the dialect's, less those that do not; the codes count most."""
    dtypes = {part.name: part.dtypes for part in dialect.parts}
    agreeing = sum(1 if entry.dtype in dtypes.get(part, ()) else -1 for part, entry in parts.items())
    codes = dialect.parts[0].name
    return agreeing + (2 if codes in parts and parts[codes].dtype in dtypes[codes] else 0)


def _part_names(dialect: Dialect) -> set[str]:
    return {part.name for part in dialect.parts}


def _missing(dialect: Dialect, parts: Mapping[str, TensorEntry]) -> list[str]:
    return [part.name for part in dialect.parts if part.required and part.name not in parts]


def _accepted(dialect: Dialect) -> str:
    return f"{dialect.value}: " + ", ".join(f"{part.name} {' or '.join(part.dtypes)}" for part in dialect.parts)
