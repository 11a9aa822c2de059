"""A tile of rows times a stored matrix in Triton, whatever the matrix is stored in.

Products are summed in float32, and weights lose nothing: block scales of e2m1 codes multiply them in bf16 (2
significant bits times 4 at most), all others, which bf16 cannot take in, multiply the sums over their columns.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muster.moe.kernels.triton_codes import (
    e2m1_pairs,
    e4m3,
    e4m3_values,
    e8m0_values,
    uint4_pairs,
)

PLAIN = tl.constexpr(0)
"""bf16 `[N, K]`."""
FP8 = tl.constexpr(1)
"""e4m3 `[N, K]`."""
FP8_BLOCK = tl.constexpr(2)
"""e4m3 `[N, K]`, float32 scales per 128 x 128."""
NVFP4 = tl.constexpr(3)
"""e2m1 pairs HALF columns apart (as in all formats from here on), e4m3 scales `[N, K/16]`."""
MXFP4 = tl.constexpr(4)
"""e2m1 pairs, e8m0 scales `[N, K/32]`."""
INT4 = tl.constexpr(5)
"""uint4 pairs, scales `[K/GROUP, N]`, zero points `[K/GROUP, N]` or 8."""
SPAN = tl.constexpr(128)
"""Columns of tokens in e4m3 that share a scale."""


@triton.jit  # type: ignore[untyped-decorator]
def _dot(x_MK, w_KN, acc_MN, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """`acc_MN` plus a product; the interpreter knows none of bf16, whose values float32 holds exactly."""
    if not ASM:
        x_MK = x_MK.to(tl.float32)
        w_KN = w_KN.to(tl.float32)
    return tl.dot(x_MK, w_KN, acc_MN, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _dot_e4m3(x_MK, w_KN, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A product of e4m3 codes, of few columns: Hopper's tensor cores keep 14 bits of a sum of such products."""
    if ASM:
        x_MK = x_MK.to(tl.float8e4nv, bitcast=True)
        w_KN = w_KN.to(tl.float8e4nv, bitcast=True)
    else:
        x_MK = e4m3_values(x_MK)
        w_KN = e4m3_values(w_KN)
    return tl.dot(x_MK, w_KN, out_dtype=tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    values_KN,
    scale_ptrs,
    mask,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """e2m1 values times the scale of each group of columns; their product is exact in bf16."""
    codes = tl.load(scale_ptrs, mask=mask, other=0)
    if FORMAT == NVFP4:  # noqa: SIM108  (Triton compiles only the branch of a constant `if`)
        scales = e4m3_values(codes)
    else:
        scales = e8m0_values(codes)
    if ASM:
        scales = scales.to(tl.bfloat16)
    by_group = values_KN.reshape(HALF // GROUP, GROUP, BLOCK_N) * scales[:, None, :]
    return by_group.reshape(HALF, BLOCK_N)


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1_step(  # type: ignore[no-untyped-def]
    acc_MN,
    x_low,
    x_high,
    packed,
    s_ptr,
    rows_N,
    N: tl.constexpr,
    K: tl.constexpr,
    k,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """`acc_MN` plus the product over 2 * HALF columns from column k on."""
    low, high = e2m1_pairs(packed, ASM)
    groups = k // GROUP + tl.arange(0, HALF // GROUP)
    s_ptrs = s_ptr + rows_N[None, :] * (K // GROUP) + groups[:, None]
    low = _scaled(low, s_ptrs, rows_N[None, :] < N, FORMAT, GROUP, HALF, BLOCK_N, ASM)
    high = _scaled(high, s_ptrs + HALF // GROUP, rows_N[None, :] < N, FORMAT, GROUP, HALF, BLOCK_N, ASM)
    return _dot(x_high, high, _dot(x_low, low, acc_MN, ASM), ASM)


@triton.jit  # type: ignore[untyped-decorator]
def _from_zero(values_KN, z_ptrs, mask, ZEROS: tl.constexpr, ASM: tl.constexpr):  # type: ignore[no-untyped-def]
    """`values_KN`, 128 too large, as distances from the zero points of their group: exact in bf16."""
    if ZEROS:
        zeros_N = tl.load(z_ptrs, mask=mask, other=0).to(tl.float32) + 128.0
        if ASM:
            zeros_N = zeros_N.to(tl.bfloat16)
        values_KN -= zeros_N[None, :]
    else:
        values_KN -= 136.0
    return values_KN


@triton.jit  # type: ignore[untyped-decorator]
def _int4_step(  # type: ignore[no-untyped-def]
    acc_MN,
    x_low,
    x_high,
    packed,
    s_ptr,
    z_ptr,
    rows_N,
    N: tl.constexpr,
    k,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """`acc_MN` plus the product over 2 * HALF columns from column k on, of one group or each half of another."""
    low, high = uint4_pairs(packed, ASM)
    real_N = rows_N < N
    at_low = k // GROUP * N + rows_N
    at_high = (k + HALF) // GROUP * N + rows_N
    part_MN = _dot(x_low, _from_zero(low, z_ptr + at_low, real_N, ZEROS, ASM), tl.zeros_like(acc_MN), ASM)
    if GROUP % (2 * HALF) != 0:
        acc_MN += part_MN * tl.load(s_ptr + at_low, mask=real_N, other=0).to(tl.float32)[None, :]
        part_MN = tl.zeros_like(acc_MN)
    part_MN = _dot(x_high, _from_zero(high, z_ptr + at_high, real_N, ZEROS, ASM), part_MN, ASM)
    return acc_MN + part_MN * tl.load(s_ptr + at_high, mask=real_N, other=0).to(tl.float32)[None, :]


@triton.jit  # type: ignore[untyped-decorator]
def matmul(  # type: ignore[no-untyped-def]
    x_ptrs,
    xs_ptrs_M,
    live_M,
    w_ptr,
    s_ptr,
    z_ptr,
    r_ptr,
    rows_N,
    N: tl.constexpr,
    K: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    R_COUNT: tl.constexpr,
    A8: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    ASM: tl.constexpr,
):
    """Rows times a matrix whose rows are `rows_N`: float32 `[BLOCK_M, BLOCK_N]`, all scales applied."""
    acc_MN = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    BLOCK_K: tl.constexpr = 2 * HALF
    tl.static_assert(not A8 or SPAN % BLOCK_K == 0, "a step crosses scales of tokens")
    tl.static_assert(FORMAT != FP8_BLOCK or GROUP % BLOCK_K == 0, "a step crosses blocks of weights")
    for k in range(0, K, BLOCK_K):
        if FORMAT >= NVFP4:
            half_K = tl.arange(0, HALF)
            w_ptrs = w_ptr + rows_N[None, :] * (K // 2) + (k // 2 + half_K)[:, None]
            packed = tl.load(w_ptrs, mask=rows_N[None, :] < N, other=0)
            x_low = tl.load(x_ptrs + (k + half_K)[None, :], mask=live_M[:, None], other=0.0)
            x_high = tl.load(x_ptrs + (k + HALF + half_K)[None, :], mask=live_M[:, None], other=0.0)
            if FORMAT == INT4:
                acc_MN = _int4_step(acc_MN, x_low, x_high, packed, s_ptr, z_ptr, rows_N, N, k, GROUP, ZEROS, HALF, ASM)
            else:
                acc_MN = _e2m1_step(
                    acc_MN, x_low, x_high, packed, s_ptr, rows_N, N, K, k, FORMAT, GROUP, HALF, BLOCK_N, ASM
                )
        else:
            span_K = k + tl.arange(0, BLOCK_K)
            x = tl.load(x_ptrs + span_K[None, :], mask=live_M[:, None] & (span_K[None, :] < K), other=0)
            w_ptrs = w_ptr + rows_N[None, :] * K + span_K[:, None]
            w = tl.load(w_ptrs, mask=(rows_N[None, :] < N) & (span_K[:, None] < K), other=0)
            if FORMAT == PLAIN:
                acc_MN = _dot(x, w, acc_MN, ASM)
            elif FORMAT == FP8 and not A8:
                acc_MN = _dot(x, e4m3(w, ASM), acc_MN, ASM)
            else:
                if A8:
                    part_MN = _dot_e4m3(x, w, ASM)
                    part_MN *= tl.load(xs_ptrs_M + k // SPAN, mask=live_M, other=0.0)[:, None]
                else:
                    part_MN = _dot(x, e4m3(w, ASM), tl.zeros_like(acc_MN), ASM)
                if FORMAT == FP8_BLOCK:
                    s_ptrs_N = s_ptr + rows_N // GROUP * tl.cdiv(K, GROUP) + k // GROUP
                    part_MN *= tl.load(s_ptrs_N, mask=rows_N < N, other=0.0)[None, :]
                acc_MN += part_MN
    if R_COUNT:
        acc_MN *= tl.load(r_ptr + rows_N // (N // R_COUNT), mask=rows_N < N, other=0.0)[None, :]
    return acc_MN
