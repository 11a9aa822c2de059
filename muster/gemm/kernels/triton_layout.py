"""How Triton's linear finds a stored matrix: codes, scales and one float32 factor per row, made once at load.

Everything that is decoded in the kernel is exact in bf16: an e2m1 code times its block scale has at most six
significant bits. What is not (a tensor scale, a channel scale, a factor that keeps intermediate powers of two small)
multiplies the float32 sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster.errors import FormatError
from muster.formats.codec import decode_scale
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import Element

HALVES = (64, 32, 16)
"""Columns whose codes lie in the low nibbles, before as many in the high ones; the largest that fits is taken."""
DEPTHS = (128, 64, 32, 16)
_LARGEST_SHIFT = 112
"""A block scale is multiplied by this power of two: a code's bits read as bf16 are 2**-126 of its value, and their
product is 2**-14 of what it should be, which is far from bf16's limits for every e4m3 scale."""
_E8M0_TOP = 127 + _LARGEST_SHIFT
_E8M0_MOST = 239
"""Beyond it the factor of a row would be no float32."""
_MAX_SPLITS = 16


@dataclass(frozen=True, eq=False)
class TritonLinearWeights:
    """A matrix `[N, K]` as the kernel reads it.

    Attributes:
        kind: "plain", "fp8", "fp8-block", "e4m3" or "e8m0" (4-bit codes with such block scales).
        codes: bf16 `[N, K]`; e4m3 as uint8 `[N, K]`; 4-bit codes uint8 `[N, K/2]`, re-laid by halves.
        scales: uint8 `[N, K / group]`, float32 `[ceil(N/128), ceil(K/128)]` for fp8-block; None: none.
        factor_N: float32, multiplies the sums; None: nothing does.
        bias_N: float32 or None.
        columns: K.
        depth: columns that one step reads at most; for 4-bit codes exactly, both halves together.
        group: columns that share a block scale.
        turns: int32 zeros, who has arrived of those that share a sum; every launch leaves zeros.
        nbytes: bytes made beyond the matrix.
    """

    kind: str
    codes: Tensor
    scales: Tensor | None
    factor_N: Tensor | None
    bias_N: Tensor | None
    columns: int
    depth: int
    group: int
    turns: Tensor
    nbytes: int

    @property
    def rows(self) -> int:
        """N."""
        return self.codes.shape[0]

    @staticmethod
    def of(matrix: QuantMatrix, bias_N: Tensor | None) -> TritonLinearWeights:
        """The layout of a matrix `[N, K]` of a family that the kernel reads.

        Raises:
            FormatError: fp8 codes that are no numbers.
        """
        family = matrix.format.family
        if matrix.format.element is Element.E2M1:
            return _low_bits(matrix, bias_N)
        depth = next(depth for depth in DEPTHS if matrix.shape[1] % depth == 0)
        if family == "bf16":
            return _made("plain", matrix.codes.contiguous(), None, None, bias_N, matrix.shape, depth, 1)
        codes = matrix.codes.contiguous().view(torch.uint8)
        broken = int(((codes & 0x7F) == 0x7F).sum())
        if broken:
            raise FormatError(f"{matrix.format.name} codes", found=f"{broken} NaN", expected="numbers")
        assert matrix.scale is not None
        if family == "fp8-block":
            scales = _multiplier(matrix.scale).contiguous()
            return _made("fp8-block", codes, scales, None, bias_N, matrix.shape, depth, 128)
        return _made("fp8", codes, None, _per_row(matrix.scale, matrix.shape[0]), bias_N, matrix.shape, depth, 1)


def splits(tiles: int, steps: int, processors: int) -> int:
    """Programs that share the columns of one tile: as many as fill the device twice, each with a few steps."""
    count = 1
    while count < _MAX_SPLITS and tiles * count * 2 <= 4 * processors and steps >= count * 4:
        count *= 2
    return count


def _low_bits(matrix: QuantMatrix, bias_N: Tensor | None) -> TritonLinearWeights:
    rows, columns = matrix.shape
    assert matrix.format.block is not None
    assert matrix.scale is not None
    group = matrix.format.block[1]
    half = next(half for half in HALVES if columns % (2 * half) == 0 and half % group == 0)
    codes = _by_halves(matrix.codes, half)
    factor_N = torch.full((rows,), 2.0**14, device=codes.device)
    if matrix.global_scale is not None:
        factor_N *= _per_row(matrix.global_scale, rows)
    scales = matrix.scale.value.view(torch.uint8).contiguous()
    kind = "e4m3"
    if matrix.scale.element is Element.E8M0:
        kind, top = "e8m0", min(int(scales.max()), _E8M0_MOST)
        # Scales relative to the largest: those that fall off the end are 2**-239 of it.
        scales = (scales.short() + (_E8M0_TOP - top)).clamp_min_(0).to(torch.uint8)
        factor_N *= 2.0 ** (top - 127)
    return _made(kind, codes, scales, factor_N, bias_N, matrix.shape, 2 * half, group)


def _by_halves(codes: Tensor, half: int) -> Tensor:
    """Codes `[N, K/2]` re-laid: byte j of a block of 2 * `half` columns holds columns j (low) and `half` + j (high)."""
    blocks = torch.stack((codes & 15, codes >> 4), -1).view(len(codes), -1, 2, half)
    return (blocks[:, :, 0] | (blocks[:, :, 1] << 4)).view(len(codes), -1)


def _multiplier(scale: Scale) -> Tensor:
    value = decode_scale(scale)
    return value if scale.meaning is Meaning.MULTIPLIES else 1 / value


def _per_row(scale: Scale, rows: int) -> Tensor:
    """A scale of each of several equal row pieces, for every row."""
    values = _multiplier(scale).flatten()
    return values.repeat_interleave(rows // len(values))


def _made(
    kind: str,
    codes: Tensor,
    scales: Tensor | None,
    factor_N: Tensor | None,
    bias_N: Tensor | None,
    shape: tuple[int, ...],
    depth: int,
    group: int,
) -> TritonLinearWeights:
    turns = torch.zeros(-(-shape[0] // 16), dtype=torch.int32, device=codes.device)
    own = [turns, *([factor_N] if factor_N is not None else []), *([codes] if kind in ("e4m3", "e8m0") else [])]
    own += [scales] if kind == "e8m0" and scales is not None else []
    nbytes = sum(tensor.nbytes for tensor in own)
    return TritonLinearWeights(kind, codes, scales, factor_N, bias_N, shape[1], depth, group, turns, nbytes)
