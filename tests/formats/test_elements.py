"""Every code of every element type, every midpoint, and the order of nibbles."""

import math
from itertools import pairwise

import pytest
import torch

from muster.formats.elements import (
    decode_e2m1,
    decode_e2m1_pairs,
    decode_e4m3,
    decode_e8m0,
    decode_uint4_pairs,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
    unpack_nibbles,
)

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def e4m3_by_the_book(code: int) -> float:
    """OCP 8-bit Floating Point v1.0: 1 sign, 4 exponent (bias 7) and 3 mantissa bits; S.1111.111 is NaN."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


ALL_BYTES = torch.arange(256, dtype=torch.uint8)
E4M3 = [e4m3_by_the_book(code) for code in range(0x7F)]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_every_e2m1_code_decodes(dtype):
    expected = torch.tensor(E2M1 + [-value for value in E2M1], dtype=dtype)
    decoded = decode_e2m1(torch.arange(16, dtype=torch.uint8), dtype)
    assert torch.equal(decoded, expected)
    assert torch.equal(decoded.signbit(), torch.arange(16) >= 8)


def test_every_e2m1_code_survives_a_round_trip():
    codes = torch.arange(16, dtype=torch.uint8)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)


@pytest.mark.parametrize("code", range(7))
@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_e2m1_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearest(code, sign, dtype):
    middle = torch.tensor((E2M1[code] + E2M1[code + 1]) / 2, dtype=dtype)
    below, above = (torch.nextafter(middle, torch.tensor(far, dtype=dtype)) for far in (0.0, 9.0))
    even = code if code % 2 == 0 else code + 1
    minus = 8 if sign < 0 else 0
    encoded = encode_e2m1(sign * torch.stack((below, middle, above)))
    assert encoded.tolist() == [code + minus, even + minus, code + 1 + minus]


def test_e2m1_saturates_and_keeps_the_sign_of_zero():
    values = torch.tensor([6.0, 6.1, 1e30, torch.inf, -torch.inf, 0.0, -0.0, 1e-45, -1e-45])
    assert encode_e2m1(values).tolist() == [7, 7, 7, 7, 15, 0, 8, 0, 8]


def test_e2m1_encodes_to_the_nearest_value_everywhere():
    values = torch.linspace(-6, 6, 48_001, dtype=torch.float64)
    table = decode_e2m1(torch.arange(16, dtype=torch.uint8), torch.float64)
    error = (decode_e2m1(encode_e2m1(values), torch.float64) - values).abs()
    assert torch.equal(error, (table - values.unsqueeze(-1)).abs().amin(-1))


def test_every_e4m3_code_decodes_as_the_specification_says():
    expected = torch.tensor([e4m3_by_the_book(code) for code in range(256)])
    decoded = decode_e4m3(ALL_BYTES)
    assert decoded.isnan().nonzero().flatten().tolist() == [0x7F, 0xFF]
    numbers = ~expected.isnan()
    assert same_bits(decoded[numbers], expected[numbers])
    assert same_bits(decoded[numbers], ALL_BYTES.view(torch.float8_e4m3fn).float()[numbers])


def test_every_e4m3_code_survives_a_round_trip():
    assert torch.equal(encode_e4m3(decode_e4m3(ALL_BYTES)).view(torch.uint8), ALL_BYTES)


def test_e4m3_midpoints_go_to_the_even_code_and_their_neighbours_to_the_nearest():
    for code, (low, high) in enumerate(pairwise(E4M3)):
        middle = torch.tensor((low + high) / 2)
        below, above = (torch.nextafter(middle, torch.tensor(far)) for far in (0.0, 1e9))
        for sign, minus in ((1, 0), (-1, 0x80)):
            encoded = encode_e4m3(sign * torch.stack((below, middle, above))).view(torch.uint8)
            assert encoded.tolist() == [code + minus, (code + code % 2) + minus, code + 1 + minus], code


def test_e4m3_saturates_at_448_and_keeps_nan():
    values = torch.tensor([448.0, 449.0, 464.0, 465.0, 1e30, torch.inf, -torch.inf])
    assert decode_e4m3(encode_e4m3(values)).tolist() == [448.0] * 6 + [-448.0]
    assert decode_e4m3(encode_e4m3(torch.tensor([torch.nan]))).isnan().all()


def test_every_e8m0_code_decodes():
    decoded = decode_e8m0(ALL_BYTES)
    assert [math.ldexp(1.0, code - 127) for code in range(255)] == decoded[:255].tolist()
    assert decoded[255].isnan()


def test_every_e8m0_code_survives_a_round_trip():
    assert torch.equal(encode_e8m0(decode_e8m0(ALL_BYTES)), ALL_BYTES)


def test_e8m0_rounds_down_to_a_power_of_two():
    powers = decode_e8m0(ALL_BYTES[1:255])
    next_one = torch.nextafter(2 * powers.double(), torch.zeros((), dtype=torch.float64)).float()
    just_above = torch.nextafter(powers, torch.full((), torch.inf))
    just_below_next = torch.nextafter(torch.where(next_one.isinf(), torch.inf, 2 * powers), torch.zeros(()))
    assert torch.equal(encode_e8m0(just_above), ALL_BYTES[1:255])
    assert torch.equal(encode_e8m0(just_below_next), ALL_BYTES[1:255])


def test_e8m0_saturates_at_both_ends():
    values = torch.tensor([0.0, -1.0, 1e-45, 3.4e38, torch.inf, -torch.inf])
    assert encode_e8m0(values).tolist() == [0, 0, 0, 254, 254, 0]


def test_the_low_nibble_is_the_even_column():
    packed = torch.tensor([0x21, 0x9F], dtype=torch.uint8)
    assert unpack_nibbles(packed).tolist() == [1, 2, 15, 9]
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
    assert decode_e2m1_pairs(packed).tolist() == [0.5, 1.0, -6.0, -0.5]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_byte_decodes_as_its_two_nibbles(dtype):
    packed = ALL_BYTES.view(4, 8, 8)
    assert torch.equal(decode_e2m1_pairs(packed, dtype), decode_e2m1(unpack_nibbles(packed), dtype))
    assert torch.equal(decode_uint4_pairs(packed, dtype), unpack_nibbles(packed).to(dtype))
    assert torch.equal(pack_nibbles(unpack_nibbles(packed)), packed)
