"""Expert layers in Triton: gate_up with its activation, down with the routing weight, and the combine.

Rows are slots (token * K + k). A block is up to BLOCK_M slots of one expert; `slots` lists them, -1 where none is, and
`experts` says whose they are, -1 for a block that does not exist.
"""

from __future__ import annotations

import triton
import triton.language as tl

from muster.moe.kernels.triton_codes import bf16, e4m3_codes
from muster.moe.kernels.triton_products import SPAN, matmul


@triton.jit  # type: ignore[untyped-decorator]
def _place(program, blocks, tiles, GROUP_M: tl.constexpr):  # type: ignore[no-untyped-def]
    """Block and tile of a program: GROUP_M neighbouring blocks, often of one expert, share a tile while it is in L2."""
    per_group = GROUP_M * tiles
    first = program // per_group * GROUP_M
    size = tl.minimum(blocks - first, GROUP_M)
    return first + program % per_group % size, program % per_group // size


@triton.jit  # type: ignore[untyped-decorator]
def gate_up_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    xs_ptr,
    slots_ptr,
    experts_ptr,
    weights_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    r_ptr,
    bias_ptr,
    inner_ptr,
    blocks,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    F: tl.constexpr,
    W_BYTES: tl.constexpr,
    S_COUNT: tl.constexpr,
    R_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    A8: tl.constexpr,
    ACTIVATION: tl.constexpr,
    LIMITED: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    GROUP_M: tl.constexpr,
    ASM: tl.constexpr,
):
    """inner[slot] = activation(x[slot // K] @ gate_up.T): one tile of F, gate and up rows side by side.

    `x` and `inner` are bf16; with A8 `x` is e4m3 codes under `xs`.
    """
    block, tile = _place(tl.program_id(0), blocks, tl.cdiv(F, BLOCK_N), GROUP_M)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slots_M = tl.load(slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live_M = slots_M >= 0
    GATED: tl.constexpr = ACTIVATION != "relu2"
    ROWS: tl.constexpr = 2 * F if GATED else F
    tokens_M = (slots_M // TOP_K).to(tl.int64)
    x_ptrs = x_ptr + tokens_M[:, None] * D
    xs_ptrs_M = xs_ptr + tokens_M * tl.cdiv(D, SPAN)
    rows_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    w_ptr += expert * W_BYTES
    s_ptr += expert * S_COUNT
    z_ptr += expert * S_COUNT
    r_ptr += expert * R_COUNT
    weight_M = tl.full((BLOCK_M,), 1.0, tl.float32)
    if WEIGH:
        weight_M = tl.load(weights_ptr + slots_M, mask=live_M, other=0.0)
    # A tile's last rows past F are up rows (or another expert's): computed, and not stored.
    if GATED:
        both_N = tl.arange(0, 2 * BLOCK_N)
        rows_2N = tile * BLOCK_N + both_N // 2 + (both_N % 2) * F
        acc = matmul(
            x_ptrs,
            xs_ptrs_M,
            live_M,
            w_ptr,
            s_ptr,
            z_ptr,
            r_ptr,
            rows_2N,
            ROWS,
            D,
            FORMAT,
            GROUP,
            ZEROS,
            R_COUNT,
            A8,
            BLOCK_M,
            2 * BLOCK_N,
            HALF,
            ASM,
        )
        gate, up = acc.reshape(BLOCK_M, BLOCK_N, 2).split()
        gate *= weight_M[:, None]
        up *= weight_M[:, None]
        if BIAS:
            gate += tl.load(bias_ptr + expert * ROWS + rows_N, mask=rows_N < F, other=0.0)[None, :]
            up += tl.load(bias_ptr + expert * ROWS + F + rows_N, mask=rows_N < F, other=0.0)[None, :]
        if LIMITED:
            # Comparisons with NaN are false: it passes.
            gate = tl.where(gate > limit, limit, gate)
            up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        if ACTIVATION == "silu":
            inner = gate * tl.sigmoid(gate) * up
        elif ACTIVATION == "gelu":
            # 0.5 * (1 + tanh(z)) is sigmoid(2 z).
            z = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
            inner = gate * tl.sigmoid(2.0 * z) * up
        else:
            inner = gate * tl.sigmoid(alpha * gate) * (up + 1.0)
    else:
        acc = matmul(
            x_ptrs,
            xs_ptrs_M,
            live_M,
            w_ptr,
            s_ptr,
            z_ptr,
            r_ptr,
            rows_N,
            ROWS,
            D,
            FORMAT,
            GROUP,
            ZEROS,
            R_COUNT,
            A8,
            BLOCK_M,
            BLOCK_N,
            HALF,
            ASM,
        )
        acc *= weight_M[:, None]
        if BIAS:
            acc += tl.load(bias_ptr + expert * ROWS + rows_N, mask=rows_N < F, other=0.0)[None, :]
        relu = tl.where(acc < 0.0, 0.0, acc)
        inner = relu * relu
    inner_ptrs = inner_ptr + slots_M.to(tl.int64)[:, None] * F + rows_N[None, :]
    tl.store(inner_ptrs, bf16(inner, ASM), mask=live_M[:, None] & (rows_N[None, :] < F))


@triton.jit  # type: ignore[untyped-decorator]
def quantise_kernel(  # type: ignore[no-untyped-def]
    x_ptr, codes_ptr, scales_ptr, K: tl.constexpr, SPANS: tl.constexpr, ASM: tl.constexpr
):
    """e4m3 codes of one row, and a scale per SPAN columns: their largest magnitude over 448, or 1 where all are 0."""
    row = tl.program_id(0).to(tl.int64)
    spans = tl.program_id(1) * SPANS + tl.arange(0, SPANS)
    columns = spans[:, None] * SPAN + tl.arange(0, SPAN)[None, :]
    x = tl.load(x_ptr + row * K + columns, mask=columns < K, other=0.0).to(tl.float32)
    scales = tl.div_rn(tl.max(tl.abs(x), axis=1), tl.full((SPANS,), 448.0, tl.float32))
    scales = tl.where(scales > 0.0, scales, 1.0)
    codes = e4m3_codes(tl.div_rn(x, tl.broadcast_to(scales[:, None], (SPANS, SPAN))), ASM)
    tl.store(codes_ptr + row * K + columns, codes, mask=columns < K)
    tl.store(scales_ptr + row * tl.cdiv(K, SPAN) + spans, scales, mask=spans < tl.cdiv(K, SPAN))


@triton.jit  # type: ignore[untyped-decorator]
def down_kernel(  # type: ignore[no-untyped-def]
    inner_ptr,
    slots_ptr,
    experts_ptr,
    weights_ptr,
    w_ptr,
    s_ptr,
    z_ptr,
    r_ptr,
    bias_ptr,
    y_ptr,
    blocks,
    D: tl.constexpr,
    F: tl.constexpr,
    W_BYTES: tl.constexpr,
    S_COUNT: tl.constexpr,
    R_COUNT: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BIAS: tl.constexpr,
    WEIGH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HALF: tl.constexpr,
    GROUP_M: tl.constexpr,
    ASM: tl.constexpr,
):
    """y[slot] = weight * (inner[slot] @ down.T + bias): one tile of D."""
    block, tile = _place(tl.program_id(0), blocks, tl.cdiv(D, BLOCK_N), GROUP_M)
    expert = tl.load(experts_ptr + block).to(tl.int64)
    if expert < 0:
        return
    slots_M = tl.load(slots_ptr + block * BLOCK_M + tl.arange(0, BLOCK_M))
    live_M = slots_M >= 0
    rows_N = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    x_ptrs = inner_ptr + slots_M.to(tl.int64)[:, None] * F
    w_ptr += expert * W_BYTES
    s_ptr += expert * S_COUNT
    z_ptr += expert * S_COUNT
    r_ptr += expert * R_COUNT
    acc = matmul(
        x_ptrs,
        x_ptrs,
        live_M,
        w_ptr,
        s_ptr,
        z_ptr,
        r_ptr,
        rows_N,
        D,
        F,
        FORMAT,
        GROUP,
        ZEROS,
        R_COUNT,
        False,
        BLOCK_M,
        BLOCK_N,
        HALF,
        ASM,
    )
    if BIAS:
        acc += tl.load(bias_ptr + expert * D + rows_N, mask=rows_N < D, other=0.0)[None, :]
    if WEIGH:
        acc *= tl.load(weights_ptr + slots_M, mask=live_M, other=0.0)[:, None]
    y_ptrs = y_ptr + slots_M.to(tl.int64)[:, None] * D + rows_N[None, :]
    tl.store(y_ptrs, bf16(acc, ASM), mask=live_M[:, None] & (rows_N[None, :] < D))


@triton.jit  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    y_ptr,
    ids_ptr,
    out_ptr,
    first,
    local,
    TOP_K: tl.constexpr,
    D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    ASM: tl.constexpr,
):
    """out[token] = the sum of its slots in slot order; slots of no local expert were never written and are skipped."""
    token = tl.program_id(0).to(tl.int64)
    columns_N = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    sum_N = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for k in tl.static_range(TOP_K):
        expert = tl.load(ids_ptr + token * TOP_K + k) - first
        written = tl.where((expert >= 0) & (expert < local), D, 0)
        y_ptrs = y_ptr + (token * TOP_K + k) * D + columns_N
        sum_N += tl.load(y_ptrs, mask=columns_N < written, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * D + columns_N, bf16(sum_N, ASM), mask=columns_N < D)
