"""Stacks of stored matrices as Triton's expert kernels read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster.formats.codec import decode_scale
from muster.formats.int4 import SYMMETRIC_ZERO
from muster.formats.matrix import Meaning, QuantMatrix, Scale

HALVES = (64, 32, 16)


@dataclass(frozen=True, eq=False)
class Matrix:
    """A stack of matrices. Where it has no tensor of a kind, the codes stand in, and nobody reads them as such.

    Attributes:
        codes: bf16 `[L, N, K]`, uint8 `[L, N, K]`, or uint8 `[L, N, K/2]` with pairs `half` columns apart.
        scales: uint8 `[L, N, K/group]` (e2m1), any float `[L, K/group, N]` (int4), float32 `[L, N/128, K/128]`
            (fp8-block).
        zeros: uint8 `[L, K/group, N]` (int4).
        row_scales: float32 `[L, P]`, for each of P equal pieces of the rows (nvfp4, fp8-tensor, fp8-channel).
        pieces: P; 0 where there are no such scales.
        group: columns that share a block scale.
        zeroed: there are zero points other than the middle of the range.
        half: columns of a step whose codes lie in low nibbles; those of the high nibbles follow. 0: no pairs.
        own: bytes beyond the stored weights.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    row_scales: Tensor
    pieces: int = 0
    group: int = 0
    zeroed: bool = False
    half: int = 0
    own: int = 0

    @staticmethod
    def of(matrix: QuantMatrix) -> Matrix:
        """The layout of a stack `[L, N, K]` of a format that the kernels read."""
        family = matrix.format.family
        if family == "bf16":
            return Matrix(*(matrix.codes,) * 4)
        if family == "int4":
            return _int4(matrix)
        if family in ("nvfp4", "mxfp4"):
            return _e2m1(matrix)
        return _fp8(matrix)


def pair_distance(columns: int, group: int) -> int:
    """How far apart the two columns of a byte lie: as far as 64, so that both are whole tiles of a product.

    Args:
        columns: K.
        group: no group of columns may begin or end within the columns of one product; 1 where several may share it.
    """
    return next(
        half
        for half in HALVES
        if columns % (2 * half) == 0 and (group == 1 or group % (2 * half) == 0 or group % half == 0)
    )


def pair_apart(codes: Tensor, half: int) -> Tensor:
    """Packed pairs of neighbours `[L, N, K/2]` as packed pairs of columns `half` apart; one expert at a time."""
    out = torch.empty_like(codes)
    for expert, packed in enumerate(codes):
        nibbles = torch.stack((packed & 15, packed >> 4), dim=-1).view(len(packed), -1, 2, half)
        out[expert] = (nibbles[:, :, 0] | (nibbles[:, :, 1] << 4)).view(len(packed), -1)
    return out


def _e2m1(matrix: QuantMatrix) -> Matrix:
    assert matrix.scale is not None
    assert matrix.format.block is not None
    half = pair_distance(matrix.shape[-1], 1)
    codes = pair_apart(matrix.codes, half)
    scales = matrix.scale.value.view(torch.uint8).contiguous()
    group = matrix.format.block[1]
    if matrix.global_scale is None:
        return Matrix(codes, scales, codes, codes, group=group, half=half, own=codes.nbytes)
    pieces = _multiplier(matrix.global_scale)
    own = codes.nbytes + pieces.nbytes
    return Matrix(codes, scales, codes, pieces, pieces.shape[-1], group=group, half=half, own=own)


def _int4(matrix: QuantMatrix) -> Matrix:
    """Scales and zero points by group first, so that a tile's rows find theirs side by side."""
    assert matrix.scale is not None
    assert matrix.zero is not None
    assert matrix.format.block is not None
    group = matrix.format.block[1]
    half = pair_distance(matrix.shape[-1], group)
    codes = pair_apart(matrix.codes, half)
    multiplies = matrix.scale.meaning is Meaning.MULTIPLIES
    scales = (matrix.scale.value if multiplies else _multiplier(matrix.scale)).mT.contiguous()
    zeroed = bool((matrix.zero != SYMMETRIC_ZERO).any())
    zeros = matrix.zero.mT.contiguous() if zeroed else codes
    own = codes.nbytes + scales.nbytes + (zeros.nbytes if zeroed else 0)
    return Matrix(codes, scales, zeros, codes, group=group, zeroed=zeroed, half=half, own=own)


def _fp8(matrix: QuantMatrix) -> Matrix:
    assert matrix.scale is not None
    codes, scales = matrix.codes.view(torch.uint8), _multiplier(matrix.scale)
    own = 0 if scales.data_ptr() == matrix.scale.value.data_ptr() else scales.nbytes
    if matrix.format.family == "fp8-block":
        return Matrix(codes, scales, codes, codes, group=128, own=own)
    pieces = scales.flatten(1)
    return Matrix(codes, codes, codes, pieces, pieces.shape[-1], own=own)


def _multiplier(scale: Scale) -> Tensor:
    """A scale's values to multiply by, float32."""
    if scale.meaning is Meaning.MULTIPLIES:
        return decode_scale(scale).contiguous()
    return (1 / decode_scale(scale, torch.float64)).float().contiguous()
