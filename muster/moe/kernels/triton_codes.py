"""Stored codes to values that a tensor core multiplies, in inline PTX, and in plain operations for the interpreter.

Every value is exact: bf16 holds 8 significant bits, e2m1 and e4m3 codes have 4 at most, 4-bit integers and their
distance from a zero point 5.
"""

from __future__ import annotations

import triton
import triton.language as tl

_E2M1_PAIRS: tl.constexpr = tl.constexpr("""
{
    .reg .b32 a, b, m, big, none;
    mov.b32 big, 0x7e807e80;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    shl.b32 m, a, 6;
    shl.b32 $0, a, 12;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 $0, $0, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $0, $0, big, none;
    shl.b32 m, b, 6;
    shl.b32 $1, b, 12;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 $1, $1, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $1, $1, big, none;
    shl.b32 m, a, 2;
    shl.b32 $2, a, 8;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 $2, $2, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $2, $2, big, none;
    shl.b32 m, b, 2;
    shl.b32 $3, b, 8;
    and.b32 m, m, 0x01c001c0;
    lop3.b32 $3, $3, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $3, $3, big, none;
}
""")
"""Four bytes to the four low and the four high nibbles' values: the code's exponent and mantissa become bf16's own,
which is its value times 2**-126 (subnormals included), and one multiplication takes that off."""

_E4M3: tl.constexpr = tl.constexpr("""
{
    .reg .b32 a, b, m, big, none;
    mov.b32 big, 0x7b807b80;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $2, 0, 0x4140;
    prmt.b32 b, $2, 0, 0x4342;
    shl.b32 m, a, 4;
    shl.b32 $0, a, 8;
    and.b32 m, m, 0x07f007f0;
    lop3.b32 $0, $0, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $0, $0, big, none;
    shl.b32 m, b, 4;
    shl.b32 $1, b, 8;
    and.b32 m, m, 0x07f007f0;
    lop3.b32 $1, $1, 0x80008000, m, 0xea;
    fma.rn.bf16x2 $1, $1, big, none;
}
""")
"""Four e4m3 bytes to bf16, the same way: their value times 2**-120."""


_UINT4_PAIRS: tl.constexpr = tl.constexpr("""
{
    .reg .b32 a, b;
    prmt.b32 a, $4, 0, 0x4140;
    prmt.b32 b, $4, 0, 0x4342;
    lop3.b32 $0, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $1, b, 0x000f000f, 0x43004300, 0xea;
    shr.b32 a, a, 4;
    shr.b32 b, b, 4;
    lop3.b32 $2, a, 0x000f000f, 0x43004300, 0xea;
    lop3.b32 $3, b, 0x000f000f, 0x43004300, 0xea;
}
""")
"""Four bytes to 128 plus the four low and the four high nibbles: the lowest bits of a bf16 between 128 and 256 count
ones.
"""


@triton.jit
def e2m1_values(nibbles):  # type: ignore[no-untyped-def]
    """Values of e2m1 codes in the low four bits, in plain operations: for the interpreter."""
    code = nibbles.to(tl.int32) & 7
    exponent = code >> 1
    whole = tl.where(exponent == 0, code & 1, (2 + (code & 1)) << (exponent - 1 + (exponent == 0)))
    value = whole.to(tl.float32) * 0.5
    return tl.where((nibbles & 8) != 0, -value, value)


@triton.jit
def e4m3_values(codes):  # type: ignore[no-untyped-def]
    """float32 values of e4m3 codes: exponent and mantissa become float32's own, times 2**-120."""
    bits = ((codes.to(tl.int32) & 0x7F) << 20) | ((codes.to(tl.int32) & 0x80) << 24)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit  # type: ignore[untyped-decorator]
def bf16(values, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Rounded to the nearest bf16, ties to even; the interpreter would cut off instead."""
    if not ASM:
        bits = values.to(tl.int32, bitcast=True)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
        values = tl.where(values == values, rounded, values)
    return values.to(tl.bfloat16)


@triton.jit  # type: ignore[untyped-decorator]
def e2m1_pairs(packed, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 values of the low and of the high nibbles."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _E2M1_PAIRS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = e2m1_values(packed & 15), e2m1_values(packed >> 4)
    return low, high


@triton.jit
def e8m0_values(codes):  # type: ignore[no-untyped-def]
    """float32 values of e8m0 codes that are numbers."""
    bits = tl.where(codes == 0, 0x00400000, codes.to(tl.int32) << 23)
    return bits.to(tl.float32, bitcast=True)


@triton.jit  # type: ignore[untyped-decorator]
def e4m3(codes, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """bf16 values of e4m3 codes."""
    if ASM:
        values = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        values = e4m3_values(codes)
    return values


@triton.jit  # type: ignore[untyped-decorator]
def uint4_pairs(packed, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """128 plus the low and 128 plus the high nibbles, in bf16."""
    if ASM:
        low, high = tl.inline_asm_elementwise(
            _UINT4_PAIRS, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        low, high = (packed & 15).to(tl.float32) + 128.0, (packed >> 4).to(tl.float32) + 128.0
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def e4m3_codes(values, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """uint8 codes of the e4m3 nearest to float32 values: ties to even, beyond +-448 saturated, NaN kept."""
    if ASM:
        codes = values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        size = tl.minimum(tl.abs(values), 448.0)
        exponent = tl.maximum((size.to(tl.int32, bitcast=True) >> 23) - 127, -6)
        steps = size * ((130 - exponent) << 23).to(tl.float32, bitcast=True)
        # Nothing under 2**24 has a fraction left after 1.5 * 2**23 was added.
        whole = (steps + 12582912.0) - 12582912.0
        magnitude = tl.where(values == values, (exponent + 6) * 8 + whole.to(tl.int32), 0x7F)
        codes = (magnitude | ((values.to(tl.int32, bitcast=True) >> 24) & 0x80)).to(tl.uint8)
    return codes
