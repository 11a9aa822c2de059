"""Where a kernel rounds besides its sums, and to what: backends declare it, the reference that judges them follows.

Rounding is quantising and decoding again, so that the reference stays in float64 between the declared points.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from muster.formats.codec import decode, decode_scale
from muster.formats.elements import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_TINY,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    quotient,
)
from muster.formats.matrix import Meaning, QuantMatrix


class Grid(Enum):
    """What values are rounded to.

    FP8_TENSOR: e4m3 under the stored activation scale (where none is stored, one).
    FP8_TOKEN: e4m3 under a float32 scale per token. FP8_GROUP: one per token and 128 columns.
    MXFP8: e4m3 under an e8m0 scale per 32 columns.
    FP8_EIGHTH: e4m3 of an eighth: what NVFP4's block scales make of its codes is 2688 at most.
    NVFP4: e2m1 under an e4m3 scale per 16 columns, that under the stored activation scale (where none is stored, one).
    """

    NONE = "none"
    BF16 = "bf16"
    F16 = "f16"
    FP8_TENSOR = "fp8-tensor"
    FP8_TOKEN = "fp8-token"
    FP8_GROUP = "fp8-group"
    MXFP8 = "mxfp8"
    FP8_EIGHTH = "fp8-eighth"
    NVFP4 = "nvfp4"


@dataclass(frozen=True)
class Rounding:
    """A kernel's rounding points, in the order in which it passes them; the output is rounded to its dtype anyway.

    Attributes:
        weights: the decoded weights, all scales but the tensor scale applied, before they are multiplied.
        first_weights: the same of the first product alone.
        input: the tokens, before the first product.
        product: the first product with its bias, before the activation function.
        inner: what the activation function gives, before the second product.
        rows: each expert's result, before it is weighted.
        weighted: each expert's weighted result, before all are summed.
    """

    weights: Grid = Grid.NONE
    first_weights: Grid = Grid.NONE
    input: Grid = Grid.NONE
    product: Grid = Grid.NONE
    inner: Grid = Grid.NONE
    rows: Grid = Grid.NONE
    weighted: Grid = Grid.NONE

    @property
    def grids(self) -> frozenset[Grid]:
        """All that something is rounded to."""
        return frozenset(vars(self).values()) - {Grid.NONE}


EXACT = Rounding()
"""Nothing is rounded but sums and the output."""


def round_to(values: Tensor, grid: Grid, scale: Tensor | None = None) -> Tensor:
    """`values` `[..., T, K]` rounded to `grid`, in their own dtype.

    Args:
        values: any float dtype; a row is a token.
        grid: to what.
        scale: the stored activation scale as a multiplier, float32, for the grids that use one.
    """
    if grid is Grid.NONE or not values.numel():
        return values
    if grid in (Grid.BF16, Grid.F16):
        return values.to(torch.bfloat16 if grid is Grid.BF16 else torch.float16).to(values.dtype)
    wide = values.float()
    if grid is Grid.NVFP4:
        rounded = _nvfp4(wide, scale)
    elif grid is Grid.MXFP8:
        rounded = _mxfp8(wide)
    else:
        rounded = _fp8(wide, grid, scale)
    return rounded.to(values.dtype)


def round_weights(matrix: QuantMatrix, grid: Grid) -> Tensor:
    """The decoded weights as float64, rounded to `grid` before the tensor scale is applied."""
    if grid is Grid.NONE:
        return decode(matrix, torch.float64)
    if matrix.global_scale is None:
        return round_to(decode(matrix, torch.float64), grid)
    values = round_to(decode(replace(matrix, global_scale=None), torch.float64), grid)
    scales = decode_scale(matrix.global_scale, torch.float64)
    scales = scales if matrix.global_scale.meaning is Meaning.MULTIPLIES else 1 / scales
    by_piece = torch.unflatten(values, -2, (scales.shape[-1], -1))
    return (by_piece * scales[..., None, None]).flatten(-3, -2)


def activation_scale(matrix: QuantMatrix) -> Tensor | None:
    """The activation scale stored beside a matrix, as a multiplier; the largest where row pieces, fed alike, differ."""
    if matrix.input_scale is None:
        return None
    value = decode_scale(matrix.input_scale)
    return (value if matrix.input_scale.meaning is Meaning.MULTIPLIES else 1 / value).amax(-1)


def _fp8(values: Tensor, grid: Grid, scale: Tensor | None) -> Tensor:
    if grid is Grid.FP8_TENSOR:
        return _through_e4m3(values, values.new_ones(()) if scale is None else scale)
    if grid is Grid.FP8_EIGHTH:
        return _through_e4m3(values, values.new_tensor(8.0))
    if grid is Grid.FP8_TOKEN:
        return _through_e4m3(values, quotient(values.abs().amax(-1, keepdim=True), E4M3_MAX))
    groups = _groups(values, 128)
    return _ungroup(_through_e4m3(groups, quotient(groups.abs().amax(-1, keepdim=True), E4M3_MAX)), values)


def _mxfp8(values: Tensor) -> Tensor:
    """OCP Microscaling: the shared exponent is that of the largest magnitude, less e4m3's largest, 8."""
    groups = _groups(values, 32)
    scales = decode_e8m0(encode_e8m0(groups.abs().amax(-1, keepdim=True) / 2.0**8))
    return _ungroup(_through_e4m3(groups, scales), values)


def _nvfp4(values: Tensor, scale: Tensor | None) -> Tensor:
    scale = values.new_ones(()) if scale is None else scale
    groups = _groups(values, 16)
    ratios = groups.abs().amax(-1, keepdim=True) / (E2M1_MAX * scale)
    steps = decode_e4m3(encode_e4m3(ratios.clamp_(min=E4M3_TINY))) * scale
    return _ungroup(decode_e2m1(encode_e2m1(groups / steps)) * steps, values)


def _through_e4m3(values: Tensor, scale: Tensor) -> Tensor:
    # A scale of zero is that of zeros, which stay zeros under any other.
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return decode_e4m3(encode_e4m3(values / scale)) * scale


def _groups(values: Tensor, width: int) -> Tensor:
    padded = torch.nn.functional.pad(values, (0, -values.shape[-1] % width))
    return torch.unflatten(padded, -1, (-1, width))


def _ungroup(groups: Tensor, like: Tensor) -> Tensor:
    return groups.flatten(-2)[..., : like.shape[-1]]
