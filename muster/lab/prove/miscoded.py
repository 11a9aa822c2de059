"""Ways to misread a stored matrix, as kernels have: each takes a matrix and gives what the bug makes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from muster.formats.codec import decode, decode_scale
from muster.formats.elements import pack_nibbles, unpack_nibbles
from muster.formats.int4 import SYMMETRIC_ZERO
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import FP8_TENSOR, Element

Misread = Callable[[QuantMatrix], QuantMatrix]

MMA_COLUMNS = 16
"""Columns that one matrix instruction takes at a time."""


def scales_one_block_on(matrix: QuantMatrix) -> QuantMatrix:
    """The scale of the block before, along K."""
    return _with_scale(matrix, _scale(matrix).value.roll(1, -1))


def scales_one_row_on(matrix: QuantMatrix) -> QuantMatrix:
    """The scales of the row, or row of blocks, above."""
    return _with_scale(matrix, _scale(matrix).value.roll(1, -2))


def scales_transposed(matrix: QuantMatrix) -> QuantMatrix:
    """Scales in memory order `[SK, SN]` read as `[SN, SK]`."""
    value = _scale(matrix).value
    return _with_scale(matrix, value.mT.contiguous().view(value.shape))


def scales_twice(matrix: QuantMatrix) -> QuantMatrix:
    """The block scales multiply the codes and, once more, the sums."""
    scale = _scale(matrix)
    return replace(matrix, scale=replace(scale, value=decode_scale(scale).square(), element=Element.F32))


def largest_scale_inverted(matrix: QuantMatrix) -> QuantMatrix:
    """The tensor scale, or the scale where there is one kind only, multiplies where it should divide, or divides."""
    if matrix.global_scale is not None:
        return replace(matrix, global_scale=_inverted(matrix.global_scale))
    return replace(matrix, scale=_inverted(_scale(matrix)))


def first_piece_for_all(matrix: QuantMatrix) -> QuantMatrix:
    """The tensor scale of the first row piece (gate, or q) for the others too."""
    if matrix.global_scale is not None:
        value = matrix.global_scale.value
        return replace(matrix, global_scale=replace(matrix.global_scale, value=value[..., :1].expand_as(value)))
    value = _scale(matrix).value
    return _with_scale(matrix, value[..., :1, :].expand_as(value))


def tensor_scale_omitted(matrix: QuantMatrix) -> QuantMatrix:
    """Block scales only."""
    return replace(matrix, global_scale=None)


def nibbles_swapped(matrix: QuantMatrix) -> QuantMatrix:
    """The even column from the high nibble."""
    return replace(matrix, codes=(matrix.codes >> 4) | (matrix.codes << 4))


def sign_lost(matrix: QuantMatrix) -> QuantMatrix:
    """e2m1 codes without their top bit."""
    return replace(matrix, codes=matrix.codes & 0x77)


def halves_flushed(matrix: QuantMatrix) -> QuantMatrix:
    """e2m1's one subnormal, 0.5, taken for nought."""
    codes = unpack_nibbles(matrix.codes)
    return replace(matrix, codes=pack_nibbles(torch.where(codes & 7 == 1, codes & 8, codes)))


def exponents_one_up(matrix: QuantMatrix) -> QuantMatrix:
    """e8m0 scales with a bias of 126."""
    return _with_scale(matrix, _scale(matrix).value + 1)


def other_e4m3(matrix: QuantMatrix) -> QuantMatrix:
    """e4m3fn codes read as e4m3fnuz, whose bias is one larger: every value is halved."""
    scale = _scale(matrix)
    factor = 0.5 if scale.meaning is Meaning.MULTIPLIES else 2.0
    return replace(matrix, scale=replace(scale, value=decode_scale(scale) * factor, element=Element.F32))


def zero_points_ignored(matrix: QuantMatrix) -> QuantMatrix:
    """int4 taken for symmetric."""
    assert matrix.zero is not None
    return replace(matrix, zero=torch.full_like(matrix.zero, SYMMETRIC_ZERO))


def zero_points_one_up(matrix: QuantMatrix) -> QuantMatrix:
    """GPTQ's two versions confused."""
    assert matrix.zero is not None
    return replace(matrix, zero=matrix.zero + 1)


def order_ignored(matrix: QuantMatrix) -> QuantMatrix:
    """Act-order columns scaled as if their groups counted up."""
    return replace(matrix, order=None)


def rows_one_on(matrix: QuantMatrix) -> QuantMatrix:
    """Every row in the place of the next."""
    return _decoded(matrix, lambda weight: weight.roll(1, -2))


def tail_skipped(matrix: QuantMatrix) -> QuantMatrix:
    """The last columns of K are not multiplied."""

    def cut(weight: Tensor) -> Tensor:
        weight[..., -MMA_COLUMNS:] = 0.0
        return weight

    return _decoded(matrix, cut)


def has_blocks_along_k(matrix: QuantMatrix) -> bool:
    """Whether a row has several scales."""
    return matrix.scale is not None and matrix.scale.value.shape[-1] > 1


def has_blocks_along_n(matrix: QuantMatrix) -> bool:
    """Whether rows have scales of their own; the equal ones of a whole tensor's row pieces do not count."""
    return matrix.scale is not None and matrix.format is not FP8_TENSOR and matrix.scale.value.shape[-2] > 1


def has_block_grid(matrix: QuantMatrix) -> bool:
    """Whether there are several scales along both axes."""
    return has_blocks_along_k(matrix) and has_blocks_along_n(matrix)


def has_pieces(matrix: QuantMatrix) -> bool:
    """Whether row pieces have tensor scales of their own."""
    scale = matrix.global_scale or (matrix.scale if matrix.format is FP8_TENSOR else None)
    if scale is None:
        return False
    values = scale.value if matrix.global_scale is not None else scale.value.squeeze(-1)
    return bool((values != values[..., :1]).any())


def _scale(matrix: QuantMatrix) -> Scale:
    assert matrix.scale is not None
    return matrix.scale


def _with_scale(matrix: QuantMatrix, value: Tensor) -> QuantMatrix:
    return replace(matrix, scale=replace(_scale(matrix), value=value))


def _inverted(scale: Scale) -> Scale:
    return replace(scale, meaning=Meaning.DIVIDES if scale.meaning is Meaning.MULTIPLIES else Meaning.MULTIPLIES)


def _decoded(matrix: QuantMatrix, change: Callable[[Tensor], Tensor]) -> QuantMatrix:
    return QuantMatrix.plain(change(decode(matrix)))
