"""Element codecs: e2m1, e4m3 and e8m0 codes to values and back, and two 4-bit codes per byte.

Sources: OCP Microscaling Formats v1.0 (e2m1, e8m0), OCP 8-bit Floating Point v1.0 (e4m3fn).
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_TINY = 2.0**-9
"""The smallest positive e4m3 value, a subnormal."""
E8M0_NAN = 255

_E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E8M0_BIAS = 127


def quotient(values: Tensor, divisor: float) -> Tensor:
    """`values / divisor`, rounded once everywhere: on a GPU torch multiplies by the reciprocal of a plain number."""
    return values / values.new_tensor(divisor)


def decode_e2m1(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e2m1 codes, uint8 in 0..15, one per element: bit 3 is the sign."""
    return _e2m1_values(dtype).to(codes.device)[codes.long()]


def encode_e2m1(values: Tensor) -> Tensor:
    """Nearest e2m1 codes as uint8 0..15: ties to the even code, beyond +-6 saturates, the sign of zero is kept.

    `values` must not hold NaN, which e2m1 cannot express.
    """
    magnitudes = values.abs()
    # Codes are a concave, piecewise linear function of the magnitude, so the least of its three lines is the code.
    # Rounding each line before adding its offset keeps near-ties exact.
    codes = (magnitudes * 2).round_()
    torch.minimum(codes, magnitudes.round().add_(2), out=codes)
    torch.minimum(codes, magnitudes.mul_(0.5).round_().add_(4), out=codes)
    return codes.clamp_(max=7).to(torch.uint8).bitwise_or_(values.signbit().to(torch.uint8) << 3)


def decode_e4m3(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values of e4m3fn codes (uint8 or torch.float8_e4m3fn); 0x7F and 0xFF are NaN."""
    # A look-up is twice as fast as the CPU's conversion.
    table = _e4m3_values(dtype).to(codes.device)
    return table.index_select(0, codes.view(torch.uint8).flatten().int()).view(codes.shape)


def encode_e4m3(values: Tensor) -> Tensor:
    """Nearest e4m3fn values as torch.float8_e4m3fn: ties to even, beyond +-448 saturates, NaN stays NaN."""
    return values.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e8m0(codes: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values `2**(code - 127)` of e8m0 codes (uint8); 255 is NaN."""
    return _e8m0_values(dtype).to(codes.device)[codes.long()]


def encode_e8m0(values: Tensor) -> Tensor:
    """Codes (uint8) of the largest power of two not above each value.

    Values below 2**-127 (zero and negative ones too) give code 0, values from 2**128 on give 254, NaN gives 255.
    """
    _, exponent = torch.frexp(values)
    codes = (exponent.int() - 1 + _E8M0_BIAS).clamp_(0, E8M0_NAN - 1)
    codes[values <= 0] = 0
    codes[values == torch.inf] = E8M0_NAN - 1
    codes[values.isnan()] = E8M0_NAN
    return codes.to(torch.uint8)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 `[..., K]` as bytes `[..., K/2]`, the even element in the low nibble."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Bytes `[..., K/2]` as uint8 codes 0..15 `[..., K]`, the low nibble first."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_e2m1_pairs(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values `[..., K]` of packed e2m1 codes `[..., K/2]`, one look-up per byte."""
    return _look_up_pairs(packed, _pairs(_e2m1_values(dtype)))


def decode_uint4_pairs(packed: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values 0..15 `[..., K]` of packed 4-bit integers `[..., K/2]`, one look-up per byte."""
    return _look_up_pairs(packed, _pairs(torch.arange(16, dtype=dtype)))


def _look_up_pairs(packed: Tensor, table: Tensor) -> Tensor:
    # A complex number is two values that torch moves as one.
    pairs = torch.view_as_complex(table.to(packed.device)).index_select(0, packed.flatten().int())
    return torch.view_as_real(pairs).view(*packed.shape[:-1], 2 * packed.shape[-1])


def _pairs(values: Tensor) -> Tensor:
    """`[256, 2]`: what the two nibbles of each byte stand for."""
    return values[unpack_nibbles(torch.arange(256, dtype=torch.uint8).unsqueeze(-1)).long()]


@cache
def _e2m1_values(dtype: torch.dtype) -> Tensor:
    magnitudes = torch.tensor(_E2M1_MAGNITUDES, dtype=dtype)
    return torch.cat((magnitudes, -magnitudes))


@cache
def _e4m3_values(dtype: torch.dtype) -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(dtype)


@cache
def _e8m0_values(dtype: torch.dtype) -> Tensor:
    return torch.tensor([2.0 ** (code - _E8M0_BIAS) for code in range(E8M0_NAN)] + [torch.nan], dtype=dtype)
