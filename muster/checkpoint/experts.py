"""The routed experts of a layer as two stacked matrices, whatever their layout on disk.

Layouts: one matrix per expert and projection (`gate_proj`, `up_proj`, `down_proj`, or `w1`, `w3`, `w2`) in any
dialect; all experts in one tensor (`gate_up_proj` `[E, 2F, D]`, `down_proj` `[E, D, F]`); gpt-oss, whose stacked gate
and up rows alternate and whose unquantised tensors are stored `[E, in, out]`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from muster.checkpoint.index import TensorEntry, torch_dtype
from muster.checkpoint.names import ExpertNames
from muster.checkpoint.quant import Stored
from muster.checkpoint.reader import Reader, stand_in
from muster.checkpoint.spec import MoESpec
from muster.errors import CheckpointError, MusterError
from muster.formats.dialects import Dialect, Part
from muster.formats.matrix import QuantMatrix, concat_rows
from muster.formats.spec import WHOLE


@dataclass(frozen=True, eq=False)
class ExpertTensors:
    """The experts of one layer.

    Attributes:
        gate_up: `[E, 2F, D]`, gate rows first, then up rows, each with its own tensor scale; `[E, F, D]` for
            activations without a gate.
        down: `[E, D, F]`.
        gate_up_bias: `[E, 2F]`, or None.
        down_bias: `[E, D]`, or None.
    """

    gate_up: QuantMatrix
    down: QuantMatrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None


@dataclass(frozen=True, eq=False)
class RouterTensors:
    """The gate of one expert layer, in stored dtypes.

    Attributes:
        weight: `[E, D]`.
        bias: `[E]`, added to the logits, or None.
        selection_bias: `[E]`, added to the scores for the choice only, or None.
    """

    weight: Tensor
    bias: Tensor | None
    selection_bias: Tensor | None


def read_router(reader: Reader, root: str, paths: ExpertNames, moe: MoESpec, hidden: int) -> RouterTensors:
    """The router under the layer `root`."""
    each = (moe.experts,)
    return RouterTensors(
        weight=reader.tensor(f"{root}.{paths.router}.weight", (moe.experts, hidden)),
        bias=reader.tensor(f"{root}.{paths.router}.bias", each) if moe.routing.gate_bias else None,
        selection_bias=reader.tensor(f"{root}.{paths.selection_bias}", each) if moe.routing.selection_bias else None,
    )


def read_experts(reader: Reader, root: str, paths: ExpertNames, moe: MoESpec, hidden: int) -> ExpertTensors:
    """The experts under the layer `root`; what is wrong goes into the reader's books."""
    inputs = (paths.gate, paths.up) if moe.activation != "relu2" else (paths.up,)
    rows = len(inputs) * moe.inner
    experts = f"{root}.{paths.experts}"
    gate_up_name, down_name = f"{experts}.{paths.gate_up_stacked}", f"{experts}.{paths.down_stacked}"

    if reader.survey.modules.keys() & {gate_up_name, down_name}:
        gate_up = _read_stacked(reader, gate_up_name, (moe.experts, rows, hidden), len(inputs), paths.transposed)
        down = _read_stacked(reader, down_name, (moe.experts, hidden, moe.inner), 1, paths.transposed)
        gate_up = _matrix_gate_first(reader, gate_up, gate_up_name) if paths.interleaved else gate_up
    else:
        gate_up = _stack(reader, [f"{experts}.*.{name}" for name in inputs], (moe.experts, moe.inner, hidden))
        down = _stack(reader, [f"{experts}.*.{paths.down}"], (moe.experts, hidden, moe.inner))
    if not moe.bias:
        return ExpertTensors(gate_up, down)
    gate_up_bias = reader.tensor(f"{gate_up_name}_bias", (moe.experts, rows))
    down_bias = reader.tensor(f"{down_name}_bias", (moe.experts, hidden))
    return ExpertTensors(gate_up, down, _gate_first(gate_up_bias) if paths.interleaved else gate_up_bias, down_bias)


def _read_stacked(
    reader: Reader, module: str, shape: tuple[int, int, int], pieces: int, transposed: bool
) -> QuantMatrix:
    """A matrix `[E, N, K]` stored as one module; its row pieces may have tensor scales of their own."""
    stored = reader.survey.modules.get(module)
    count, rows, columns = shape
    if stored is None:
        return reader.matrix(module, shape)
    if transposed and stored.dialect is Dialect.PLAIN:
        by_input = reader.matrix(module, (count, columns, rows))
        return QuantMatrix.plain(by_input.codes.transpose(-1, -2).contiguous())
    own = {part for part in stored.parts if _per_piece(reader, stored, part, count, pieces)}
    if not own:
        return reader.matrix(module, shape)

    reader.books.consume(stored.parts.values())
    tensors = {part: reader.index.read(name) for part, name in stored.parts.items()}
    matrices = []
    for piece in range(pieces):
        parts = {
            part: tensor.reshape(count, pieces)[:, piece] if part in own else _rows_of_piece(tensor, piece, pieces)
            for part, tensor in tensors.items()
        }
        matrices.append(reader.decide(stored, parts, (count, rows // pieces, columns), module))
    return _fuse(reader, matrices)


def _per_piece(reader: Reader, stored: Stored, part: str, count: int, pieces: int) -> bool:
    """Whether a stacked part holds one value for every expert's gate and another for its up."""
    scalars = {part.name for part in stored.dialect.parts if part.holds in ("global_scale", "input_scale")}
    return pieces > 1 and part in scalars and prod(reader.index.entry(stored.parts[part]).shape) == count * pieces


def _rows_of_piece(tensor: Tensor, piece: int, pieces: int) -> Tensor:
    """The rows of one piece of a stacked part; a part with one value per expert belongs to all pieces."""
    if tensor.ndim < 3:
        return tensor
    height = tensor.shape[1] // pieces
    return tensor[:, piece * height : (piece + 1) * height]


def _stack(reader: Reader, patterns: Sequence[str], shape: tuple[int, int, int]) -> QuantMatrix:
    """One matrix `[N, K]` per expert and row piece as one `[E, pieces * N, K]`, read straight into place.

    Args:
        reader: where from.
        patterns: the modules of each row piece, `*` in the place of the expert's number.
        shape: `[E, N, K]` of one piece.
    """
    count, rows, columns = shape
    modules = [pattern.replace("*", str(expert)) for expert in range(count) for pattern in patterns]
    stored = reader.alike(modules, f"shape {[rows, columns]}")
    parts = None if stored is None else _stack_parts(reader, stored, (count, len(patterns)))
    if stored is None or parts is None:
        return QuantMatrix.plain(stand_in((count, len(patterns) * rows, columns)))
    matrices = []
    for piece, pattern in enumerate(patterns):
        own = {name: part[:, piece] if part.ndim > 1 else part for name, part in parts.items()}
        matrices.append(reader.decide(stored[0], own, shape, pattern))
    return _fuse(reader, matrices, parts[stored[0].dialect.parts[0].name])


def _fuse(reader: Reader, pieces: Sequence[QuantMatrix], codes: Tensor | None = None) -> QuantMatrix:
    """Row pieces as one matrix; `codes` `[E, pieces, ...]` may be the memory that all their codes are views of."""
    count, rows, columns = pieces[0].shape
    whole = (count, len(pieces) * rows, columns)
    if not reader.books.clean:
        return QuantMatrix.plain(stand_in(whole))
    in_place = codes is not None and all(
        piece.codes.data_ptr() == codes[:, number].data_ptr() for number, piece in enumerate(pieces)
    )
    try:
        if codes is None or not in_place:
            return concat_rows(pieces)
        scales = concat_rows([p.with_tensors({"codes": p.codes[..., :0]}, p.shape) for p in pieces])
        return scales.with_tensors({"codes": codes.view(pieces[0].codes.dtype).view(*whole[:-1], -1)}, whole)
    except MusterError as error:
        reader.books.note(error)
        return QuantMatrix.plain(stand_in(whole))


def _stack_parts(reader: Reader, stored: Sequence[Stored], lead: tuple[int, int]) -> dict[str, Tensor] | None:
    """The parts of all experts' row pieces, `[E, pieces, ...]` each; None, after noting why, where they differ.

    A part that states the shape is the same for all and comes as the one it is.
    """
    parts: dict[str, Tensor] = {}
    jobs: list[tuple[str, Tensor]] = []
    known = stored[0].dialect.parts
    present = [part for part in known if any(part.name in module.parts for module in stored)]
    common = {part.name: _common_entry(reader, part, stored) for part in present}
    if None in common.values():
        return None
    for name, entry in common.items():
        assert entry is not None
        stack = torch.empty((*lead, *entry.shape), dtype=torch_dtype(entry))
        if not all(name in module.parts for module in stored):
            stack.fill_(torch.nan)
        places = zip(stored, stack.flatten(0, 1), strict=True)
        jobs += [(module.parts[name], place) for module, place in places if name in module.parts]
        parts[name] = stack
    reader.index.copy_into(jobs)
    for part in present:
        if part.holds == "shape":
            parts[part.name] = _one_for_all(reader, [module.parts[part.name] for module in stored], parts[part.name])
    return parts


def _one_for_all(reader: Reader, names: Sequence[str], values: Tensor) -> Tensor:
    """The value that a part has in all experts, after noting who differs."""
    flat = values.flatten(0, 1)
    usual = flat.mode(dim=0).values
    for name, value in zip(names, flat, strict=True):
        if not torch.equal(value, usual):
            reader.books.note(CheckpointError(name, found=str(value.tolist()), expected=str(usual.tolist())))
    return usual


def _common_entry(reader: Reader, part: Part, stored: Sequence[Stored]) -> TensorEntry | None:
    """One entry of a part that has one dtype and shape in all experts; None, after noting who differs or lacks it.

    Activation scales may be lacking: calibration does not reach every expert.
    """
    entries = [reader.index.entry(module.parts[part.name]) for module in stored if part.name in module.parts]
    (dtype, shape), agreeing = Counter((entry.dtype, entry.shape) for entry in entries).most_common(1)[0]
    for entry in entries:
        if (entry.dtype, entry.shape) != (dtype, shape):
            found, usual = f"{entry.dtype} {list(entry.shape)}", f"{dtype} {list(shape)}, as other experts have it"
            reader.books.note(CheckpointError(entry.name, found=found, expected=usual))
    lacking = [] if part.holds == "input_scale" else [module for module in stored if part.name not in module.parts]
    for module in lacking:
        codes = module.dialect.parts[0].name
        reader.books.absent(module.parts[codes].removesuffix(codes) + part.name, "it, as other experts have it")
    return entries[0] if agreeing == len(entries) and not lacking else None


def _matrix_gate_first(reader: Reader, matrix: QuantMatrix, name: str) -> QuantMatrix:
    """A stack whose rows alternate gate, up, gate, up with all gate rows first."""
    if matrix.format.block is not None and matrix.format.block[0] not in (WHOLE, 1):
        found = f"alternating gate and up rows in {matrix.format.name}"
        reader.books.note(CheckpointError(name, found=found, expected="a format whose rows have scales of their own"))
        return QuantMatrix.plain(stand_in(matrix.shape))
    by_row = {part: tensor for part, tensor in matrix.tensors.items() if tensor.shape[1:2] == matrix.shape[1:2]}
    return matrix.with_tensors({part: _gate_first(tensor) for part, tensor in by_row.items()}, matrix.shape)


def _gate_first(tensor: Tensor) -> Tensor:
    """`[E, rows, ...]` with the even rows first, then the odd ones."""
    return torch.cat((tensor[:, 0::2], tensor[:, 1::2]), dim=1)
