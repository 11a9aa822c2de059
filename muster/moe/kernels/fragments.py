"""Stacks of matrices in the order in which tensor cores take them: a lane reads 16 bytes that are its operands.

A tile is 64 rows, 16 of them a warp's; a chunk is 64 columns. Lane 4 g + t holds its warp's rows g and g + 8 and the
chunk's columns 16 t to 16 t + 15, as the A fragments of four m16n8k16 products (PTX ISA, "Matrix Fragments for
mma.m16n8k16"): the sixteen columns of a product are no neighbours, but what a lane holds of a row is under one scale.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from muster.formats.codec import block_amax, decode_scale, spread
from muster.formats.matrix import Meaning, QuantMatrix
from muster.formats.spec import Element, Format
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights

TILE, CHUNK = 64, 64
"""Rows and columns of a unit."""
_BITS = ((15, 6), (12, 3), (13, 0), (14, 9))
"""Of each of the four pairs in a word: where a half-word holds sign and magnitude (see `decode` in the kernels)."""
_LEAST_EXPONENT = -10
"""An e4m3 scale, subnormals included, as three mantissa bits under an exponent that counts from here."""
_LARGEST_FIELD = 254
"""bf16's largest exponent field: that of a matrix's largest e8m0 scale."""


def format_constants(format: Format, *, e4m3: bool = False) -> dict[str, str | int]:
    """What the kernels must know of a format: where its scales are and what they mean.

    UNIT bytes are a unit's; results are multiplied by GAIN too. Of 4-bit codes a scale's bf16 bits are
    `byte * SCALE_STEP + SCALE_BASE`, for both half-words, and `SCALE_SHARE` neighbouring lanes of a row read the same
    byte. Of E4M3 codes a unit has BLOCK_SCALES, or rows have ROW_SCALES, or a matrix has one. With `e4m3` tokens are in
    e4m3 (A8).
    """
    given: dict[str, str | int] = {"A8": e4m3}
    if format.element is Element.E4M3:
        by_block, by_row = format.name == "fp8-block", format.name == "fp8-channel"
        unit = 4096 + (16 if by_block else 0)
        return given | {"E4M3": 1, "BLOCK_SCALES": by_block, "ROW_SCALES": by_row, "UNIT": unit, "GAIN": "1.0f"}
    given |= {"E4M3": 0, "BLOCK_SCALES": 0, "ROW_SCALES": 0, "GAIN": "8.0f" if e4m3 else "256.0f"}
    if format.name == "nvfp4":
        return given | {"SCALE_STEP": "0x00100010u", "SCALE_BASE": "0x75807580u", "SCALE_SHARE": 1, "UNIT": 2048 + 256}
    return given | {"SCALE_STEP": "0x00800080u", "SCALE_BASE": "0u", "SCALE_SHARE": 2, "UNIT": 2048 + 128}


@dataclass(frozen=True, eq=False)
class Fragments:
    """A stack of NVFP4, MXFP4 or FP8 matrices `[L, N, K]`.

    Attributes:
        units: uint8 `[L, N/64, K/64, UNIT]`. 4 bits: codes `[4 warps, 32 lanes, 16]`, eight in each little-endian word,
            then scales `[4 warps, 32 lanes, 2]` for rows g and g + 8. NVFP4: five exponent bits over three mantissa
            bits. MXFP4: half as many lanes; the exponent alone, counted from the largest of the matrix. FP8: codes
            `[2, 4 warps, 32 lanes, 16]`, of rows g, then of rows g + 8; scales by block: float32 `[4]`, of rows g, of
            rows g + 8, and nothing.
        tensor_scales: float32 `[L, P]` to multiply by, and by the format's GAIN; one for each row where rows have
            scales, else two of gate_up and one of down.
    """

    units: Tensor
    tensor_scales: Tensor

    @property
    def tiles(self) -> int:
        """Tiles of 64 rows."""
        return self.units.shape[1]

    @property
    def chunks(self) -> int:
        """Chunks of 64 columns."""
        return self.units.shape[2]

    @property
    def nbytes(self) -> int:
        """All of it is a copy."""
        return self.units.nbytes + self.tensor_scales.nbytes

    @staticmethod
    def of(matrix: QuantMatrix, *, gated: bool, e4m3: bool = False) -> Fragments:
        """The layout, one expert at a time; `gated` puts a gate row and its up row into a warp's rows g and g + 8.

        With `e4m3`, for tokens in e4m3, 4-bit codes lie in another order; FP8 codes do as ever.

        A warp's eight gate rows then are those that a lane would take of a chunk of 64 columns, two of each sixteen:
        gate row 16 g // 2 + 2 i + g % 2 of every 64 is the i-th warp's. So what a warp has computed lies together in
        the next product's order of columns.
        """
        experts, rows, columns = matrix.shape
        tiles, chunks = rows // TILE, columns // CHUNK
        given = format_constants(matrix.format)
        made: dict[str, Any] = {"device": matrix.codes.device}
        pieces = rows if given["ROW_SCALES"] else 2 if gated else 1
        tensor = torch.empty((experts, pieces), dtype=torch.float32, **made)
        units = torch.empty((experts, tiles, chunks, int(given["UNIT"])), dtype=torch.uint8, **made)
        pack = _pack_e4m3 if given["E4M3"] else partial(_pack_e2m1, arrange=_codes_for_bytes if e4m3 else _codes)
        for expert in range(experts):
            units[expert], tensor[expert] = pack(matrix[expert], gated)
        return Fragments(units, tensor)


def _pack_e2m1(
    matrix: QuantMatrix, gated: bool, arrange: Callable[[Tensor, int, int, bool], Tensor]
) -> tuple[Tensor, Tensor]:
    """Units and tensor scales of one matrix of 4-bit codes."""
    packed, zero, tensor = _scale_bytes(matrix)
    warps, chunks = matrix.shape[0] // 16, matrix.shape[1] // CHUNK
    codes = arrange(_without_zeros(matrix.codes, zero), warps, chunks, gated)
    return torch.cat((_in_units(codes.view(torch.uint8)), _in_units(_scales(packed, codes, gated))), -1), tensor


_LEAST_OF_LARGEST = 2.0**-60
_BYTES = (2, 0, 3, 1)
"""The columns in the bytes of a word of e4m3: its upper bytes are one pair, its lower ones, shifted, the other."""


def _pack_e4m3(matrix: QuantMatrix, gated: bool) -> tuple[Tensor, Tensor]:
    """Units and tensor scales of one FP8 matrix. A code that is NaN makes its scale so: kernels know no such code."""
    assert matrix.scale is not None
    assert matrix.format.block is not None
    rows, columns = matrix.shape
    warps, chunks = rows // 16, columns // CHUNK
    codes = matrix.codes.view(torch.uint8)
    scale = decode_scale(matrix.scale, torch.float64)
    scale = scale if matrix.scale.meaning is Meaning.MULTIPLIES else 1 / scale
    if matrix.format.name == "fp8-block":
        # `wgmma` divides one block's scale by another's. What is this far below the largest is nought beside it.
        least = scale.amax() * _LEAST_OF_LARGEST
        codes = codes.masked_fill(spread(scale < least, matrix), 0)
        scale = scale.clamp_min(torch.where(least > 0, least, 1.0))
    unknown = block_amax(((codes & 127) == 127).float(), matrix.format.block) > 0
    scale = torch.where(unknown, torch.nan, scale).float()
    words = _in_tiles(codes, warps, gated).reshape(warps, 2, 8, chunks, 4, 4, 4)[..., _BYTES]
    planes = words.permute(1, 0, 3, 2, 4, 5, 6).reshape(2, warps, chunks, 32, 16)
    units = torch.cat([_in_units(plane.contiguous()) for plane in planes], -1)
    if matrix.format.name != "fp8-block":
        return units, scale.flatten()
    # Of each 64 rows, then of each tile; gate_up's tiles hold 32 rows of both.
    by_chunk = scale.repeat_interleave(2, 0).repeat_interleave(2, 1)
    halves = torch.unflatten(by_chunk, 0, (2, -1)).repeat_interleave(2, 1) if gated else by_chunk.expand(2, -1, -1)
    scales = torch.nn.functional.pad(halves.permute(1, 2, 0), (0, 2)).contiguous()
    return torch.cat((units, scales.view(torch.uint8)), -1), scale.new_ones(1)


def _in_units(by_warp: Tensor) -> Tensor:
    """`[N/16, K/64, 32, n]`, of each warp, as `[N/64, K/64, 4 * 32 * n]`."""
    warps, chunks = by_warp.shape[:2]
    return by_warp.reshape(warps // 4, 4, chunks, -1).transpose(1, 2).flatten(2)


@dataclass(frozen=True, eq=False)
class FragmentLayer:
    """An expert layer in this layout, biases in float32."""

    problem: MoEProblem
    gate_up: Fragments
    down: Fragments
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @staticmethod
    def of(problem: MoEProblem, weights: ExpertWeights, *, e4m3: bool = False) -> FragmentLayer:
        """Makes the layout; with `e4m3` the first product's is for tokens in e4m3."""
        gate_up = Fragments.of(weights.gate_up, gated=True, e4m3=e4m3)
        down = Fragments.of(weights.down, gated=False)
        gate_up_bias, down_bias = (
            None if bias is None else bias.float().contiguous() for bias in (weights.gate_up_bias, weights.down_bias)
        )
        return FragmentLayer(problem, gate_up, down, gate_up_bias, down_bias)

    @property
    def nbytes(self) -> int:
        """Bytes beyond the stored weights."""
        return self.gate_up.nbytes + self.down.nbytes


def activation_constants(problem: MoEProblem) -> dict[str, str]:
    """LIMIT and ALPHA of the activation, where it has them."""
    constants = {}
    if problem.activation.limit is not None:
        constants["LIMIT"] = f"{float(problem.activation.limit)!r}f"
    if problem.activation.name == "swiglu-oai":
        constants["ALPHA"] = f"{problem.activation.alpha!r}f"
    return constants


def _scale_bytes(matrix: QuantMatrix) -> tuple[Tensor, Tensor, Tensor]:
    """Of one matrix: its scales as the kernels read them, where they are nought, and what is left to multiply by."""
    assert matrix.scale is not None
    if matrix.scale.element is Element.E8M0:
        exponents = matrix.scale.value.view(torch.uint8).to(torch.int32)
        largest = exponents.max()
        fields = exponents - largest + _LARGEST_FIELD
        # A scale 2**254 below the matrix's largest is nought beside it.
        left = torch.exp2((largest - _LARGEST_FIELD + 118).double()).float()
        return fields.clamp_min(0).to(torch.uint8), fields <= 0, left
    wide = decode_scale(matrix.scale)
    mantissa, exponent = torch.frexp(wide)
    eighths = (mantissa * 16).to(torch.int32) - 8
    packed = torch.where(wide == 0, 0, ((exponent - 1 - _LEAST_EXPONENT) << 3) | eighths).to(torch.uint8)
    assert matrix.global_scale is not None
    left = decode_scale(matrix.global_scale, torch.float64)
    return packed, wide == 0, left if matrix.global_scale.meaning is Meaning.MULTIPLIES else 1 / left


def _without_zeros(codes: Tensor, zero: Tensor) -> Tensor:
    """Codes under a scale of nought become nought: the layout's scales cannot say it."""
    return codes.masked_fill(zero.repeat_interleave(codes.shape[-1] // zero.shape[-1], dim=-1), 0)


def _in_tiles(rows: Tensor, tiles: int, gated: bool) -> Tensor:
    """`[N, ...]` as `[N/16, 2, 8, ...]`: rows g and g + 8 of each tile."""
    if gated:
        by_unit = rows.view(2, tiles // 8, 4, 8, 2, *rows.shape[1:]).transpose(2, 3)
        return by_unit.reshape(2, tiles, 8, *rows.shape[1:]).transpose(0, 1)
    return rows.view(tiles, 2, 8, *rows.shape[1:])


def _codes(codes: Tensor, tiles: int, chunks: int, gated: bool) -> Tensor:
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    # half-row, g, chunk, t, word, pair, place in the pair
    by_lane = _in_tiles(nibbles, tiles, gated).reshape(tiles, 2, 8, chunks, 4, 4, 2, 2).to(torch.int32)
    words = torch.zeros((tiles, 8, chunks, 4, 4), dtype=torch.int32, device=codes.device)
    for number, (sign, magnitude) in enumerate(_BITS):
        pair = by_lane[:, number % 2, :, :, :, :, number // 2]
        placed = ((pair >> 3) << sign) | ((pair & 7) << magnitude)
        words |= placed[..., 0] | (placed[..., 1] << 16)
    return words.transpose(1, 2).reshape(tiles, chunks, 32, 4)


def _codes_for_bytes(codes: Tensor, tiles: int, chunks: int, gated: bool) -> Tensor:
    """Four magnitudes choose the bytes of a word; columns in the order of FP8's.

    Of eight codes the first four magnitudes are the lower nibbles, the others the upper ones. Signs are the nibbles'
    uppermost bits: of the first four those at the ends of bytes, of the others those in their middle.
    """
    nibbles = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2)
    # half-row, g, chunk, t, product, four columns and four more
    by_lane = _in_tiles(nibbles, tiles, gated).reshape(tiles, 2, 8, chunks, 4, 2, 2, 4)[..., _BYTES].long()
    words = torch.zeros(by_lane.shape[:-2], dtype=torch.int64, device=codes.device)
    for half in range(2):
        for byte in range(4):
            code = by_lane[..., half, byte]
            words |= (code & 7) << (16 * half + 4 * byte)
            words |= (code >> 3) << (8 * byte + (3 if half else 7))
    return words.permute(0, 3, 2, 4, 5, 1).reshape(tiles, chunks, 32, 4).to(torch.int32)


def _scales(packed: Tensor, codes: Tensor, gated: bool) -> Tensor:
    tiles, chunks = codes.shape[:2]
    groups = packed.shape[-1] // chunks
    by_lane = _in_tiles(packed, tiles, gated).reshape(tiles, 2, 8, chunks, groups)
    return by_lane.permute(0, 3, 2, 4, 1).reshape(tiles, chunks, 8 * groups, 2)
