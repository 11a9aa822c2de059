"""A weight matrix as stored, with its scales as objects: the one form in which weights travel from file to kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from types import MappingProxyType

import torch
from torch import Tensor

from muster.errors import FormatError
from muster.formats.spec import BF16, F16, F32, WHOLE, Element, Format


class Meaning(Enum):
    """What a stored scale does to the decoded code."""

    MULTIPLIES = "multiplies"
    DIVIDES = "divides"


@dataclass(frozen=True, eq=False)
class Scale:
    """A scale as stored: value, meaning, dialect.

    Attributes:
        value: the stored tensor, its payload untouched (e8m0 scales are uint8 codes).
        element: what the payload's bits mean.
        meaning: multiplies or divides.
        dialect: who writes it this way (`modelopt`, `compressed-tensors`, `gpt-oss`, ...), for messages.
    """

    value: Tensor
    element: Element
    meaning: Meaning = Meaning.MULTIPLIES
    dialect: str = "muster"


@dataclass(frozen=True, eq=False)
class QuantMatrix:
    """A matrix `[..., N, K]` in a stored format (plain bf16, f16 and f32 included).

    Attributes:
        format: what the bits mean.
        shape: the logical shape `[..., N, K]`.
        codes: `[..., N, K]` for 8-bit and plain elements; uint8 `[..., N, K/2]` for 4-bit elements, the even column
            in the low nibble. int4 codes are unsigned; `zero` says what stands for nought.
        scale: block scales, value `[..., SN, SK]` with `format.scale_shape`; for `fp8-tensor` `[..., P, 1]`, one per
            row piece. None for plain formats.
        global_scale: NVFP4's tensor scale, float32 `[..., P]`: one for each of P equal row pieces (a fused gate and
            up keep their own), None for other formats.
        zero: int4 zero points, uint8 `[..., SN, SK]`; None for other formats.
        order: for act-order GPTQ, the scale group of each column, int32 `[..., K]`; None means k // group.
        input_scale: the activation scale stored beside the weight, float32 `[..., P]`; weight-only kernels ignore it.
    """

    format: Format
    shape: tuple[int, ...]
    codes: Tensor
    scale: Scale | None = None
    global_scale: Scale | None = None
    zero: Tensor | None = None
    order: Tensor | None = None
    input_scale: Scale | None = None

    @classmethod
    def plain(cls, tensor: Tensor) -> QuantMatrix:
        """An unquantised matrix: a bf16, f16 or f32 tensor `[..., N, K]`."""
        return cls(format=_PLAIN[tensor.dtype], shape=tuple(tensor.shape), codes=tensor)

    @property
    def scales(self) -> Mapping[str, Scale]:
        """The scales it has, by field name."""
        fields = {"scale": self.scale, "global_scale": self.global_scale, "input_scale": self.input_scale}
        return {name: scale for name, scale in fields.items() if scale is not None}

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors it is made of, by field name."""
        fields = {"codes": self.codes, "zero": self.zero, "order": self.order}
        present = {name: tensor for name, tensor in fields.items() if tensor is not None}
        return present | {name: scale.value for name, scale in self.scales.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all its tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def __getitem__(self, expert: int) -> QuantMatrix:
        """The matrix of one expert of a stack, a view."""
        if len(self.shape) < 3:
            raise IndexError(f"a single {self.shape} matrix has no experts")
        return self.with_tensors({name: tensor[expert] for name, tensor in self.tensors.items()}, self.shape[1:])

    def with_tensors(self, tensors: Mapping[str, Tensor], shape: tuple[int, ...]) -> QuantMatrix:
        """The same kind of matrix made of other tensors, by field name; those not given stay."""
        scales = {name: replace(scale, value=tensors[name]) for name, scale in self.scales.items() if name in tensors}
        return replace(self, shape=shape, **{**tensors, **scales})  # type: ignore[arg-type]


_PLAIN = MappingProxyType({torch.bfloat16: BF16, torch.float16: F16, torch.float32: F32})


def stack(matrices: Sequence[QuantMatrix]) -> QuantMatrix:
    """Matrices of one shape and format as one `[len(matrices), ..., N, K]`.

    Raises:
        FormatError: they differ in shape, format, or the kind of their scales.
    """
    _check_alike("matrices to stack", matrices, [matrix.shape for matrix in matrices])
    first = matrices[0]
    stacked = {name: torch.stack([matrix.tensors[name] for matrix in matrices]) for name in first.tensors}
    return first.with_tensors(stacked, (len(matrices), *first.shape))


def concat_rows(pieces: Sequence[QuantMatrix]) -> QuantMatrix:
    """Matrices over the same columns, one below the other (gate and up; q, k and v), each keeping its own scales.

    Tensor scales become one value per equal row piece: pieces of unequal height repeat theirs, so q, k, v of 8, 2, 2
    rows have the scales q, q, q, q, k, v.

    Raises:
        FormatError: they differ in columns, format, kind of scales or act-order; a piece after the first would start
            inside a block of rows that share a scale.
    """
    what = "row pieces"
    _check_alike(what, pieces, [(*piece.shape[:-2], piece.shape[-1]) for piece in pieces])
    first = pieces[0]
    if first.order is not None and not all(torch.equal(first.order, p.order) for p in pieces if p.order is not None):
        raise FormatError(what, found="different g_idx", expected="one column order", hint="keep the pieces apart")

    rows = [piece.shape[-2] for piece in pieces]
    block_rows = first.format.block[0] if first.format.block is not None else 1
    if block_rows and any(height % block_rows for height in rows[:-1]):
        raise FormatError(
            what,
            found=f"{first.format.name} pieces of {rows} rows",
            expected=f"every piece but the last to end on a {block_rows}-row block",
            hint="put the piece with the partial block last, or keep the pieces apart",
        )

    joined = {}
    for name in first.tensors:
        parts = [piece.tensors[name] for piece in pieces]
        if name == "order":
            joined[name] = parts[0]
        elif name in ("global_scale", "input_scale"):
            joined[name] = _concat_per_piece(parts, rows, axis=-1)
        elif name == "scale" and block_rows == WHOLE:
            joined[name] = _concat_per_piece(parts, rows, axis=-2)
        else:
            joined[name] = torch.cat(parts, dim=-2)
    return first.with_tensors(joined, (*first.shape[:-2], sum(rows), first.shape[-1]))


def _concat_per_piece(values: Sequence[Tensor], rows: Sequence[int], axis: int) -> Tensor:
    """Values that each stand for an equal share of their matrix's rows, as values for equal shares of all rows."""
    heights = [count // value.shape[axis] for value, count in zip(values, rows, strict=True)]
    unit = math.gcd(*heights)
    repeated = (v.repeat_interleave(height // unit, dim=axis) for v, height in zip(values, heights, strict=True))
    return torch.cat(list(repeated), dim=axis)


def _check_alike(what: str, matrices: Sequence[QuantMatrix], shapes: Sequence[tuple[int, ...]]) -> None:
    """One FormatError with every quality in which the matrices differ."""
    qualities: dict[str, Sequence[object]] = {
        "shape": shapes,
        "format": [matrix.format.name for matrix in matrices],
        "tensors": [{name: str(t.dtype) for name, t in matrix.tensors.items()} for matrix in matrices],
        "scales": [
            {name: f"{s.element.value} {s.meaning.value}" for name, s in matrix.scales.items()} for matrix in matrices
        ],
    }
    problems = [
        FormatError(quality, found=" and ".join(dict.fromkeys(map(str, values))), expected="the same for all")
        for quality, values in qualities.items()
        if any(value != values[0] for value in values)
    ]
    error = FormatError.gather(what, problems)
    if error is not None:
        raise error
