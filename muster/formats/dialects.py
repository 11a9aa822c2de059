"""How checkpoints spell a quantised matrix: the tensors of each dialect, their dtypes and shapes, as data.

Everything here but `read` and `write` works on headers alone and imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Literal, Protocol

from muster.errors import FormatError
from muster.formats.spec import (
    BF16,
    F16,
    F32,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Format,
    int4,
)

if TYPE_CHECKING:
    from torch import Tensor

    from muster.formats.matrix import QuantMatrix

CODES_PER_WORD = 8
"""4-bit codes in one I32 word of the int4 dialects."""


class Header(Protocol):
    """What a safetensors header says of one tensor."""

    @property
    def dtype(self) -> str:
        """The safetensors name: "BF16", "F8_E4M3", "U8", ..."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape on disk."""


Field = Literal["codes", "scale", "global_scale", "input_scale", "zero", "order", "shape"]


@dataclass(frozen=True)
class Part:
    """One tensor of a stored matrix.

    Attributes:
        name: what follows the module's name.
        holds: the field of QuantMatrix it becomes; "shape" is only compared.
        dtypes: safetensors dtypes it may have, the usual one first.
        required: whether the dialect can do without.
        divides: the scale divides; all others multiply.
    """

    name: str
    holds: Field
    dtypes: tuple[str, ...]
    required: bool = True
    divides: bool = False

    @property
    def is_scale(self) -> bool:
        """Whether it becomes a Scale."""
        return self.holds in ("scale", "global_scale", "input_scale")


class Dialect(Enum):
    """A way to spell a matrix on disk.

    PLAIN: `weight`. A stacked `experts.gate_up_proj` has no suffix; its tensor is the part `weight` all the same.
    MODELOPT_NVFP4: the tensor scale multiplies. CT_NVFP4 (compressed-tensors): it divides.
    GPT_OSS_MXFP4: 32 codes in 16 bytes, blocks on an axis of their own. CT_MXFP4: rows of bytes.
    FP8_BLOCK: 128x128 blocks; `weight_scale_inv` multiplies in spite of its name.
    MODELOPT_FP8, CT_FP8: one scale per tensor, per row or per 128x128 block, told apart by the scale's shape.
    CT_INT4: compressed-tensors `pack-quantized`. GPTQ stores zero points less one, GPTQ_V2 as they are. AWQ: `gemm`.
    """

    PLAIN = "plain"
    MODELOPT_NVFP4 = "modelopt-nvfp4"
    CT_NVFP4 = "compressed-tensors-nvfp4"
    GPT_OSS_MXFP4 = "gpt-oss-mxfp4"
    CT_MXFP4 = "compressed-tensors-mxfp4"
    FP8_BLOCK = "fp8-block"
    MODELOPT_FP8 = "modelopt-fp8"
    CT_FP8 = "compressed-tensors-fp8"
    CT_INT4 = "compressed-tensors-int4"
    GPTQ = "gptq"
    GPTQ_V2 = "gptq-v2"
    AWQ = "awq"

    @property
    def parts(self) -> tuple[Part, ...]:
        """Its tensors, the codes first."""
        return _PARTS[self]

    def tensor_name(self, module: str, part: str) -> str:
        """The name in the file of one part of `module` (gpt-oss joins with an underscore, all others with a dot)."""
        return f"{module}{'_' if self is Dialect.GPT_OSS_MXFP4 else '.'}{part}"


_GPTQ_PARTS = (
    Part("qweight", "codes", ("I32",)),
    Part("qzeros", "zero", ("I32",)),
    Part("scales", "scale", ("F16", "BF16", "F32")),
    Part("g_idx", "order", ("I32",), required=False),
)

_PARTS: Mapping[Dialect, tuple[Part, ...]] = {
    Dialect.PLAIN: (Part("weight", "codes", ("BF16", "F16", "F32")),),
    Dialect.MODELOPT_NVFP4: (
        Part("weight", "codes", ("U8",)),
        Part("weight_scale", "scale", ("F8_E4M3",)),
        Part("weight_scale_2", "global_scale", ("F32",)),
        Part("input_scale", "input_scale", ("F32",), required=False),
    ),
    Dialect.CT_NVFP4: (
        Part("weight_packed", "codes", ("U8",)),
        Part("weight_scale", "scale", ("F8_E4M3",)),
        Part("weight_global_scale", "global_scale", ("F32",), divides=True),
        Part("input_global_scale", "input_scale", ("F32",), required=False, divides=True),
    ),
    Dialect.GPT_OSS_MXFP4: (Part("blocks", "codes", ("U8",)), Part("scales", "scale", ("U8",))),
    Dialect.CT_MXFP4: (Part("weight_packed", "codes", ("U8",)), Part("weight_scale", "scale", ("U8", "F8_E8M0"))),
    Dialect.FP8_BLOCK: (
        Part("weight", "codes", ("F8_E4M3",)),
        Part("weight_scale_inv", "scale", ("F32", "BF16", "F8_E8M0")),
    ),
    Dialect.MODELOPT_FP8: (
        Part("weight", "codes", ("F8_E4M3",)),
        Part("weight_scale", "scale", ("F32",)),
        Part("input_scale", "input_scale", ("F32",), required=False),
    ),
    Dialect.CT_FP8: (
        Part("weight", "codes", ("F8_E4M3",)),
        Part("weight_scale", "scale", ("F32", "BF16", "F16")),
        Part("input_scale", "input_scale", ("F32", "BF16", "F16"), required=False),
    ),
    Dialect.CT_INT4: (
        Part("weight_packed", "codes", ("I32",)),
        Part("weight_scale", "scale", ("BF16", "F16", "F32")),
        Part("weight_shape", "shape", ("I64", "I32")),
        Part("weight_zero_point", "zero", ("I32",), required=False),
        Part("weight_g_idx", "order", ("I32",), required=False),
    ),
    Dialect.GPTQ: _GPTQ_PARTS,
    Dialect.GPTQ_V2: _GPTQ_PARTS,
    Dialect.AWQ: _GPTQ_PARTS[:3],
}


def detect(parts: Mapping[str, Header]) -> Dialect | None:
    """The dialect that these tensors of one module (by part name) are stored in; None if no dialect has them.

    Dialects that store the same names are told apart by shape: GPTQ packs input columns, AWQ output rows; modelopt
    writes FP8 scales as [], [N] or 4-D, compressed-tensors as [1] or 2-D. GPTQ_V2 looks like GPTQ on disk: only the
    config (`checkpoint_format`) tells them apart.
    """
    for dialect, known in _PARTS.items():
        dtypes = {part.name: part.dtypes for part in known}
        complete = all(part.name in parts for part in known if part.required)
        fits = complete and all(header.dtype in dtypes.get(name, ()) for name, header in parts.items())
        if fits and _shapes_fit(dialect, parts):
            return dialect
    return None


def _shapes_fit(dialect: Dialect, parts: Mapping[str, Header]) -> bool:
    """Whether shapes, too, speak for a dialect whose names and dtypes do."""
    if dialect is Dialect.GPTQ:
        return parts["qweight"].shape[-1] == parts["scales"].shape[-1]
    if dialect is Dialect.MODELOPT_FP8:
        scale = parts["weight_scale"].shape
        return len(scale) != 2 and scale != (1,)
    return dialect is not Dialect.GPTQ_V2


def shape_of(dialect: Dialect, parts: Mapping[str, Header]) -> tuple[int, ...]:
    """The logical shape `[..., N, K]` of a matrix, from its headers."""
    *lead, rows, last = parts[dialect.parts[0].name].shape
    if dialect in (Dialect.MODELOPT_NVFP4, Dialect.CT_NVFP4, Dialect.CT_MXFP4):
        return (*lead, rows, 2 * last)
    if dialect is Dialect.GPT_OSS_MXFP4:
        return (*lead, 2 * rows * last)
    if dialect is Dialect.CT_INT4:
        return (*lead, rows, CODES_PER_WORD * last)
    if dialect in (Dialect.GPTQ, Dialect.GPTQ_V2):
        return (*lead, last, CODES_PER_WORD * rows)
    if dialect is Dialect.AWQ:
        return (*lead, CODES_PER_WORD * last, rows)
    return (*lead, rows, last)


def format_of(dialect: Dialect, parts: Mapping[str, Header]) -> Format:
    """The format of a matrix, from its headers.

    Raises:
        FormatError: int4 scales that do not divide K into groups.
    """
    if dialect is Dialect.PLAIN:
        return {"BF16": BF16, "F16": F16, "F32": F32}[parts["weight"].dtype]
    if dialect in (Dialect.MODELOPT_NVFP4, Dialect.CT_NVFP4):
        return NVFP4
    if dialect in (Dialect.GPT_OSS_MXFP4, Dialect.CT_MXFP4):
        return MXFP4
    if dialect is Dialect.FP8_BLOCK:
        return FP8_BLOCK
    if dialect in (Dialect.MODELOPT_FP8, Dialect.CT_FP8):
        return _fp8_format(parts["weight"].shape, parts["weight_scale"].shape)
    columns = shape_of(dialect, parts)[-1]
    groups = parts["weight_scale"].shape[-1] if dialect is Dialect.CT_INT4 else parts["scales"].shape[-2]
    if columns % groups:
        raise FormatError("int4 scales", found=f"{groups} groups over {columns} columns", expected="equal groups")
    return int4(columns // groups)


def _fp8_format(weight: tuple[int, ...], scale: tuple[int, ...]) -> Format:
    lead = len(weight) - 2
    extents = [extent for extent in scale[lead:] if extent != 1]
    if not extents:
        return FP8_TENSOR
    return FP8_CHANNEL if extents == [weight[-2]] else FP8_BLOCK


def disk_shape(dialect: Dialect, part: Part, shape: tuple[int, ...], format: Format) -> tuple[int, ...]:
    """The shape in which `dialect` writes one part of a matrix of logical shape `[..., N, K]`."""
    *lead, rows, columns = shape
    if part.holds == "codes":
        return (*lead, *_codes_shape(dialect, rows, columns, format))
    if part.holds == "shape":
        return (2,)
    if part.holds == "order":
        return (*lead, columns)
    if part.holds in ("global_scale", "input_scale"):
        return (*lead, 1) if dialect in (Dialect.CT_NVFP4, Dialect.CT_FP8) else tuple(lead)

    scale_rows, groups = format.scale_shape(rows, columns)
    if part.holds == "zero":
        words = -(-rows // CODES_PER_WORD)
        return (*lead, words, groups) if dialect is Dialect.CT_INT4 else (*lead, groups, words)
    if dialect in _COLUMNS_FIRST:
        return (*lead, groups, rows)
    if dialect is Dialect.MODELOPT_FP8 and format is not FP8_TENSOR:
        return (*lead, rows) if format is FP8_CHANNEL else (*lead, scale_rows, 1, groups, 1)
    if format is FP8_TENSOR:
        return (*lead, 1) if dialect is Dialect.CT_FP8 else tuple(lead)
    return (*lead, scale_rows, groups)


def _codes_shape(dialect: Dialect, rows: int, columns: int, format: Format) -> tuple[int, ...]:
    if dialect is Dialect.AWQ:
        return columns, rows // CODES_PER_WORD
    if dialect in _COLUMNS_FIRST:
        return columns // CODES_PER_WORD, rows
    if dialect is Dialect.CT_INT4:
        return rows, columns // CODES_PER_WORD
    if dialect is Dialect.GPT_OSS_MXFP4:
        return rows, columns // 32, 16
    return rows, columns // format.codes_per_byte


_COLUMNS_FIRST = (Dialect.GPTQ, Dialect.GPTQ_V2, Dialect.AWQ)


def read(dialect: Dialect, parts: Mapping[str, Tensor], shape: tuple[int, ...], name: str) -> QuantMatrix:
    """A matrix from the tensors of its parts (by part name), all on one device.

    Payloads are kept as they are; only the int4 dialects are repacked, without loss, into our nibble order.
    Activation scales (`input_scale`) are carried along unchecked: weight-only kernels never use them, and
    checkpoints leave them at zero for experts that calibration never reached.

    Args:
        dialect: how it is spelled.
        parts: its tensors; a scalar scale may be `[]` or `[1]`.
        shape: the logical shape `[..., N, K]` the model expects.
        name: the module's name, for messages.

    Raises:
        FormatError: a part missing, not of this dialect, or of the wrong dtype or shape; a weight scale that is zero,
            negative, infinite, NaN or a reserved code, with the expert ids; all problems at once. A zero block scale
            is fine where every code of its block stands for nought, as in a block of zero weights.
    """
    from muster.formats import layouts

    return layouts.read(dialect, parts, shape, name)


def write(matrix: QuantMatrix, dialect: Dialect) -> dict[str, Tensor]:
    """The tensors that spell `matrix` in `dialect`, by part name.

    A scale whose meaning differs from the dialect's is written as its float32 reciprocal; codes are never touched.

    Raises:
        FormatError: the dialect cannot hold this format, or its one tensor scale cannot hold that of several pieces.
    """
    from muster.formats import layouts

    return layouts.write(matrix, dialect)
