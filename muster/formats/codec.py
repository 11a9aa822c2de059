"""Decode and encode of whole matrices in plain torch: the definition that every kernel is held to."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from muster.errors import FormatError
from muster.formats.elements import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_TINY,
    decode_e2m1,
    decode_e2m1_pairs,
    decode_e4m3,
    decode_e8m0,
    decode_uint4_pairs,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
    quotient,
    unpack_nibbles,
)
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import FP8_TENSOR, MXFP4, NVFP4, WHOLE, Element, Format

__all__ = [
    "decode",
    "decode_e2m1",
    "decode_e4m3",
    "decode_e8m0",
    "decode_scale",
    "encode",
    "encode_e2m1",
    "encode_e4m3",
    "encode_e8m0",
    "pack_nibbles",
    "unpack_nibbles",
]

SMALLEST_SCALE = 2.0**-117
"""No float32 scale we write is smaller, so that an e4m3 scale times it is a normal number and nothing divides by 0."""

_PLAIN = {Element.BF16: torch.bfloat16, Element.F16: torch.float16, Element.F32: torch.float32}


def decode(matrix: QuantMatrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """The values `[..., N, K]` that a stored matrix stands for.

    Computed in float64 when `dtype` is float64, else in float32 and rounded to `dtype` at the end. A code times its
    block scale comes first (for 4-bit codes that product is exact), the tensor scale last; a scale that divides
    really divides. So each value is rounded once per factor and no reciprocal is ever formed.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    values = decode_codes(matrix, wide)
    if matrix.scale is not None:
        _scale_(*_by_block(values, decode_scale(matrix.scale, wide), matrix), matrix.scale.meaning)
    if matrix.global_scale is not None:
        tensor_scales = decode_scale(matrix.global_scale, wide)
        by_piece = torch.unflatten(values, -2, (tensor_scales.shape[-1], -1))
        _scale_(by_piece, tensor_scales[..., None, None], matrix.global_scale.meaning)
    return values.to(dtype)


def decode_codes(matrix: QuantMatrix, dtype: torch.dtype) -> Tensor:
    """The codes' own values `[..., N, K]`, zero points taken off, scales not yet applied. A fresh tensor."""
    element = matrix.format.element
    if element is Element.E2M1:
        return decode_e2m1_pairs(matrix.codes, dtype)
    if element is Element.E4M3:
        return decode_e4m3(matrix.codes, dtype)
    if element is Element.UINT4:
        values = decode_uint4_pairs(matrix.codes, dtype)
        assert matrix.zero is not None
        blocks, zeros = _by_block(values, matrix.zero.to(dtype), matrix)
        blocks.sub_(zeros)
        return values
    return matrix.codes.to(dtype, copy=True)


def decode_scale(scale: Scale, dtype: torch.dtype = torch.float32) -> Tensor:
    """A scale's values, whatever its element; its meaning is not applied."""
    if scale.element is Element.E4M3:
        return decode_e4m3(scale.value, dtype)
    if scale.element is Element.E8M0:
        return decode_e8m0(scale.value, dtype)
    return scale.value.to(dtype)


def spread(scales: Tensor, matrix: QuantMatrix) -> Tensor:
    """Values per block `[..., SN, SK]` as values per element, `[..., N, K]` or broadcastable to it."""
    assert matrix.format.block is not None
    rows, columns = matrix.shape[-2:]
    block_rows, block_columns = matrix.format.block
    if matrix.order is not None:
        groups = matrix.order.long().unsqueeze(-2).expand(*scales.shape[:-1], columns)
        scales = scales.gather(-1, groups)
    elif block_columns != WHOLE:
        scales = scales.repeat_interleave(block_columns, dim=-1)[..., :columns]
    if block_rows != 1:
        scales = scales.repeat_interleave(block_rows or rows // scales.shape[-2], dim=-2)[..., :rows, :]
    return scales


def block_amax(values: Tensor, block: tuple[int, int]) -> Tensor:
    """The largest magnitude of each block of `[..., N, K]`, as `[..., SN, SK]`; edge blocks may be partial."""
    rows, columns = (extent or whole for extent, whole in zip(block, values.shape[-2:], strict=True))
    padding = (0, -values.shape[-1] % columns, 0, -values.shape[-2] % rows)
    magnitudes = torch.nn.functional.pad(values.abs(), padding) if any(padding) else values.abs()
    by_columns = torch.unflatten(magnitudes, -1, (-1, columns))
    return torch.unflatten(by_columns, -3, (-1, rows)).amax((-3, -1))


def encode(weight: Tensor, format: Format, pieces: int = 1, tensor_scale: Meaning = Meaning.MULTIPLIES) -> QuantMatrix:
    """`weight` in `format`, with scales from the largest magnitude of each block.

    - nvfp4: tensor scale amax / (6 * 448) per row piece, block scale e4m3(amax / (6 * tensor scale)) in [2**-9, 448].
    - mxfp4: block scale 2**(floor(log2(amax)) - 2), as OCP Microscaling has it: magnitudes above 6 times it saturate.
    - fp8-*: block scale amax / 448.
    - int4: the 16-step grid that just holds nought and both extremes of the group.

    Args:
        weight: `[..., N, K]`, computed in float32.
        format: what to encode to.
        pieces: equal row pieces of `weight` that get a tensor scale each (nvfp4, fp8-tensor).
        tensor_scale: whether NVFP4's tensor scale multiplies (modelopt) or divides (compressed-tensors). A float32
            reciprocal is not exact, so whoever writes the second dialect chooses before the codes are made.

    Raises:
        FormatError: weights that are not finite, rows or columns that the format cannot cut evenly.
    """
    _check_encodable(weight, format, pieces)
    values = weight.to(torch.float32)
    if format.family == "nvfp4":
        return _encode_nvfp4(values, pieces, tensor_scale)
    if format.family == "mxfp4":
        return _encode_mxfp4(values)
    if format.family == "int4":
        return _encode_int4(values, format)
    if format.element is Element.E4M3:
        return _encode_fp8(values, format, pieces)
    codes = weight.to(_PLAIN[format.element])
    _check_finite(codes, f"weights as {format.name}")
    return QuantMatrix.plain(codes)


def _encode_nvfp4(values: Tensor, pieces: int, meaning: Meaning) -> QuantMatrix:
    by_piece = torch.unflatten(values, -2, (pieces, -1))
    amax = by_piece.abs().amax((-2, -1))
    if meaning is Meaning.MULTIPLIES:
        tensor_scale = quotient(amax, E2M1_MAX * E4M3_MAX).clamp_(min=SMALLEST_SCALE)
    else:
        tensor_scale = (E2M1_MAX * E4M3_MAX / amax).clamp_(max=1 / SMALLEST_SCALE)
    wide = tensor_scale[..., None, None]

    ratios = block_amax(by_piece, _block(NVFP4)) / _scaled(torch.tensor(E2M1_MAX), wide, meaning)
    block_scales = encode_e4m3(ratios.clamp_(min=E4M3_TINY))
    steps = _scaled(decode_e4m3(block_scales), wide, meaning).unsqueeze(-1)
    codes = encode_e2m1(torch.unflatten(by_piece, -1, (-1, 16)) / steps)
    return QuantMatrix(
        NVFP4,
        tuple(values.shape),
        pack_nibbles(codes.view(values.shape)),
        scale=Scale(block_scales.flatten(-3, -2), Element.E4M3),
        global_scale=Scale(tensor_scale, Element.F32, meaning),
    )


def _encode_mxfp4(values: Tensor) -> QuantMatrix:
    scales = encode_e8m0(block_amax(values, _block(MXFP4)) / 4)
    codes = encode_e2m1(torch.unflatten(values, -1, (-1, 32)) / decode_e8m0(scales).unsqueeze(-1))
    packed = pack_nibbles(codes.view(values.shape))
    return QuantMatrix(MXFP4, tuple(values.shape), packed, scale=Scale(scales, Element.E8M0))


def _encode_fp8(values: Tensor, format: Format, pieces: int) -> QuantMatrix:
    rows, columns = _block(format)
    if format is FP8_TENSOR:
        rows = values.shape[-2] // pieces
    scales = quotient(block_amax(values, (rows, columns)), E4M3_MAX).clamp_(min=SMALLEST_SCALE)
    matrix = QuantMatrix(format, tuple(values.shape), values, scale=Scale(scales, Element.F32))
    return replace(matrix, codes=encode_e4m3(values / spread(scales, matrix)))


def _encode_int4(values: Tensor, format: Format) -> QuantMatrix:
    groups = torch.unflatten(values, -1, (-1, _block(format)[1]))
    low = groups.amin(-1).clamp_(max=0)
    high = groups.amax(-1).clamp_(min=0)
    scales = quotient(high - low, 15.0).clamp_(min=SMALLEST_SCALE)
    zeros = (-low / scales).round_().clamp_(0, 15)
    codes = (groups / scales.unsqueeze(-1)).round_().add_(zeros.unsqueeze(-1)).clamp_(0, 15)
    return QuantMatrix(
        format,
        tuple(values.shape),
        pack_nibbles(codes.to(torch.uint8).view(values.shape)),
        scale=Scale(scales, Element.F32),
        zero=zeros.to(torch.uint8),
    )


def _check_encodable(weight: Tensor, format: Format, pieces: int) -> None:
    _check_finite(weight, "weights to encode")
    rows, columns = weight.shape[-2:]
    step = _block(format)[1] if format.element.bits == 4 else 1
    if columns % (step or 2):
        raise FormatError(f"{format.name} matrix", found=f"{columns} columns", expected=f"a multiple of {step or 2}")
    if rows % pieces:
        raise FormatError(f"{format.name} matrix", found=f"{rows} rows", expected=f"{pieces} equal row pieces")
    if pieces > 1 and not (format.global_scale or format is FP8_TENSOR):
        raise FormatError(f"{format.name} matrix", found=f"{pieces} pieces", expected="1: it has no tensor scale")


def _check_finite(values: Tensor, what: str) -> None:
    finite = values.isfinite()
    if not finite.all():
        first = tuple((~finite).nonzero()[0].tolist())
        raise FormatError(what, found=f"{int((~finite).sum())} not finite, the first at {first}", expected="numbers")


def _block(format: Format) -> tuple[int, int]:
    assert format.block is not None
    return format.block


def _by_block(values: Tensor, scales: Tensor, matrix: QuantMatrix) -> tuple[Tensor, Tensor]:
    """Views of elements and of what belongs to their blocks that broadcast against each other."""
    rows, columns = _block(matrix.format)
    if rows == 1 and columns != WHOLE and matrix.order is None and values.shape[-1] % columns == 0:
        return torch.unflatten(values, -1, (-1, columns)), scales.unsqueeze(-1)
    return values, spread(scales, matrix)


def _scaled(values: Tensor, scales: Tensor, meaning: Meaning) -> Tensor:
    return values * scales if meaning is Meaning.MULTIPLIES else values / scales


def _scale_(values: Tensor, scales: Tensor, meaning: Meaning) -> None:
    if meaning is Meaning.MULTIPLIES:
        values.mul_(scales)
    else:
        values.div_(scales)
