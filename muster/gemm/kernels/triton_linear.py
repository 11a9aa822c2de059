"""A linear over a stored matrix on a GPU: weights times tokens by `tl.dot`, low-bit weights decoded in registers.

Few tokens: the columns of a tile are shared among programs, so that enough memory is asked for at once; whoever comes
last adds the shares in their order, so that every run gives the same bits. Weights are the left operand: 64 of their
rows make Hopper's `wgmma`, however few tokens there are.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from muster.gemm.kernels.triton_layout import TritonLinearWeights, splits
from muster.workspace import Workspace

_KINDS = {"plain": 0, "fp8": 1, "fp8-block": 2, "e4m3": 3, "e8m0": 4}
_DECODE = 64
"""Up to so many tokens the columns of a tile may be shared."""


_TWO_120: tl.constexpr = tl.constexpr(2.0**120)
_TWO_112: tl.constexpr = tl.constexpr(2.0**112)
_E2M1: tl.constexpr = tl.constexpr("""
{
    .reg .b32 one, two, bits;
    prmt.b32 one, $4, 0, 0x4140;
    prmt.b32 two, $4, 0, 0x4342;
    shl.b32 bits, one, 6;
    shl.b32 $0, one, 12;
    and.b32 bits, bits, 0x01c001c0;
    lop3.b32 $0, $0, 0x80008000, bits, 0xea;
    shl.b32 bits, two, 6;
    shl.b32 $1, two, 12;
    and.b32 bits, bits, 0x01c001c0;
    lop3.b32 $1, $1, 0x80008000, bits, 0xea;
    shl.b32 bits, one, 2;
    shl.b32 $2, one, 8;
    and.b32 bits, bits, 0x01c001c0;
    lop3.b32 $2, $2, 0x80008000, bits, 0xea;
    shl.b32 bits, two, 2;
    shl.b32 $3, two, 8;
    and.b32 bits, bits, 0x01c001c0;
    lop3.b32 $3, $3, 0x80008000, bits, 0xea;
}
""")
"""Four bytes to the bits of four low and four high nibbles, two to a word; lop3 0xea is (a & b) | c."""
_E4M3: tl.constexpr = tl.constexpr("""
{
    .reg .b32 one, two, bits;
    prmt.b32 one, $2, 0, 0x4140;
    prmt.b32 two, $2, 0, 0x4342;
    shl.b32 bits, one, 4;
    shl.b32 $0, one, 8;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 $0, $0, 0x80008000, bits, 0xea;
    shl.b32 bits, two, 4;
    shl.b32 $1, two, 8;
    and.b32 bits, bits, 0x07f007f0;
    lop3.b32 $1, $1, 0x80008000, bits, 0xea;
}
""")
"""Four e4m3 bytes to bf16 bits the same way."""


@dataclass(frozen=True)
class Tile:
    """Sizes of one launch.

    Attributes:
        rows: of the matrix.
        tokens: of the input.
        depth: columns of a step.
        warps, stages: as Triton has them.
    """

    rows: int
    tokens: int
    depth: int
    warps: int
    stages: int


def tile(kind: str, tokens: int, depth: int) -> Tile:
    """The sizes for so many tokens; within the shared memory of every GPU from 8.0 on.

    Args:
        kind: of the weights.
        tokens: T.
        depth: columns that the layout lets a step read.
    """
    block = max(16, min(128, triton.next_power_of_2(tokens)))
    if block > 64:
        plain = kind == "plain"
        return Tile(128, 128, min(depth, 64) if plain else depth, 8, 3 if plain else 2)
    if block == 64 and kind == "fp8-block":
        # Its second sum of a step takes registers: at 128 columns 12.0 spills.
        depth = min(depth, 64)
    return Tile(64, block, depth, 4, 4 if block == 16 else 3)


def linear(weights: TritonLinearWeights, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
    """Writes `x_TK @ w.T + bias`; both bf16 and contiguous."""
    tokens, columns = x_TK.shape
    if not tokens:
        return
    sizes = tile(weights.kind, tokens, weights.depth)
    row_tiles, token_tiles = triton.cdiv(weights.rows, sizes.rows), triton.cdiv(tokens, sizes.tokens)
    steps = columns // sizes.depth
    shares = splits(row_tiles, steps, _processors(x_TK.device)) if tokens <= _DECODE else 1
    partial = x_TK
    if shares > 1:
        partial = workspace.take("triton shares", (row_tiles * shares, sizes.rows, sizes.tokens), torch.float32)
    anything = weights.codes
    _linear[(row_tiles * token_tiles, shares)](
        x_TK,
        weights.codes,
        anything if weights.scales is None else weights.scales,
        anything if weights.factor_N is None else weights.factor_N,
        anything if weights.bias_N is None else weights.bias_N,
        out_TN,
        partial,
        weights.turns,
        tokens,
        weights.rows,
        K=columns,
        KIND=_KINDS[weights.kind],
        GROUP=weights.group,
        FACTOR=weights.factor_N is not None,
        BIAS=weights.bias_N is not None,
        SHARES=shares,
        BLOCK_N=sizes.rows,
        BLOCK_T=sizes.tokens,
        BLOCK_K=sizes.depth,
        BF16=os.environ.get("TRITON_INTERPRET") != "1",
        num_warps=sizes.warps,
        num_stages=sizes.stages,
    )


@cache
def _processors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


# A single token is no case of its own: what Triton made of it was slower than of sixteen (44 to 37 us on an H200).
@triton.jit(do_not_specialize=["tokens"])  # type: ignore[untyped-decorator]
def _linear(  # type: ignore[no-untyped-def]
    x_TK,
    codes,
    scales,
    factor_N,
    bias_N,
    out_TN,
    partial,
    turns,
    tokens,
    rows,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    FACTOR: tl.constexpr,
    BIAS: tl.constexpr,
    SHARES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BF16: tl.constexpr,
):
    token_tiles = tl.cdiv(tokens, BLOCK_T)
    row_tile = tl.program_id(0) // token_tiles
    token_tile = tl.program_id(0) % token_tiles
    share = tl.program_id(1)
    n = row_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    t = token_tile * BLOCK_T + tl.arange(0, BLOCK_T)
    # Rows and tokens past the end read the last one, and nobody writes what comes of it.
    from_n = tl.minimum(n, rows - 1).to(tl.int64)
    from_t = tl.minimum(t, tokens - 1).to(tl.int64)

    STEPS: tl.constexpr = K // BLOCK_K
    first, last = share * STEPS // SHARES, (share + 1) * STEPS // SHARES
    acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for step in range(first, last):
        acc = _step(acc, x_TK, codes, scales, from_n, from_t, step, K, KIND, GROUP, BLOCK_N, BLOCK_K, BF16)

    if SHARES > 1:
        offsets = tl.arange(0, BLOCK_N)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        mine = partial + row_tile * (SHARES * BLOCK_N * BLOCK_T) + offsets
        tl.store(mine + share * (BLOCK_N * BLOCK_T), acc)
        tl.debug_barrier()
        arrived = tl.atomic_add(turns + row_tile, 1, sem="acq_rel")
        if arrived == SHARES - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
            for other in range(SHARES):
                acc += tl.load(mine + other * (BLOCK_N * BLOCK_T), cache_modifier=".cg")
            tl.store(turns + row_tile, 0)
            _write(acc, factor_N, bias_N, out_TN, n, t, rows, tokens, FACTOR, BIAS)
    else:
        _write(acc, factor_N, bias_N, out_TN, n, t, rows, tokens, FACTOR, BIAS)


@triton.jit  # type: ignore[untyped-decorator]
def _write(  # type: ignore[no-untyped-def]
    acc, factor_N, bias_N, out_TN, n, t, rows, tokens, FACTOR: tl.constexpr, BIAS: tl.constexpr
):
    if FACTOR:
        acc *= tl.load(factor_N + n, mask=n < rows, other=0.0)[:, None]
    if BIAS:
        acc += tl.load(bias_N + n, mask=n < rows, other=0.0)[:, None]
    to = out_TN + t[None, :].to(tl.int64) * rows + n[:, None]
    tl.store(to, acc.to(out_TN.dtype.element_ty), mask=(n[:, None] < rows) & (t[None, :] < tokens))


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    acc,
    x_TK,
    codes,
    scales,
    n,
    t,
    step,
    K: tl.constexpr,
    KIND: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BF16: tl.constexpr,
):
    """Adds the products of one step's columns."""
    if KIND >= 3:
        HALF: tl.constexpr = BLOCK_K // 2
        GROUPS: tl.constexpr = HALF // GROUP
        k = tl.arange(0, HALF)
        low, high = _e2m1(tl.load(codes + n[:, None] * (K // 2) + step * HALF + k[None, :]), BF16)
        x_KT = x_TK + t[None, :] * K + step * BLOCK_K + k[:, None]
        g = tl.arange(0, GROUPS)
        scale_NG = scales + n[:, None] * (K // GROUP) + step * (2 * GROUPS) + g[None, :]
        low = _scaled(low, tl.load(scale_NG), KIND, BLOCK_N, GROUPS, GROUP, BF16)
        acc = _dot(low, tl.load(x_KT), acc, BF16)
        high = _scaled(high, tl.load(scale_NG + GROUPS), KIND, BLOCK_N, GROUPS, GROUP, BF16)
        acc = _dot(high, tl.load(x_KT + HALF), acc, BF16)
    else:
        k = step * BLOCK_K + tl.arange(0, BLOCK_K)
        w = tl.load(codes + n[:, None] * K + k[None, :])
        x = tl.load(x_TK + t[None, :] * K + k[:, None])
        if KIND == 0:
            acc = _dot(w, x, acc, BF16)
        elif KIND == 1:
            acc = _dot(_e4m3(w, BF16), x, acc, BF16)
        else:
            COLUMNS: tl.constexpr = (K + 127) // 128
            scale = tl.load(scales + n // 128 * COLUMNS + step * BLOCK_K // 128)
            acc += _dot(_e4m3(w, BF16), x, tl.zeros_like(acc), BF16) * scale[:, None]
    return acc


@triton.jit  # type: ignore[untyped-decorator]
def _dot(w_NK, x_KT, acc_NT, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    if not BF16:
        w_NK = w_NK.to(tl.float32)
        x_KT = x_KT.to(tl.float32)
    return tl.dot(w_NK, x_KT, acc_NT, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def _float(bits, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """The number that a bf16 of these 16 bits is; the interpreter computes with bf16 as if it were integers."""
    if BF16:  # noqa: SIM108
        number = bits.to(tl.bfloat16, bitcast=True)
    else:
        number = (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return number


@triton.jit  # type: ignore[untyped-decorator]
def _e2m1(packed, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """2**-126 of the values of low and of high nibbles.

    A code's exponent and mantissa bits become a bf16's own; that of 0.5 is subnormal, as its code is.
    """
    if BF16:
        low, high = tl.inline_asm_elementwise(
            _E2M1, "=r,=r,=r,=r,r", [packed], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=4
        )
    else:
        wide = packed.to(tl.int16)
        low = _float(((wide << 12) & -0x8000) | ((wide << 6) & 0x01C0), BF16)
        high = _float(((wide << 8) & -0x8000) | ((wide << 2) & 0x01C0), BF16)
    return low, high


@triton.jit  # type: ignore[untyped-decorator]
def _e4m3(codes, BF16: tl.constexpr):  # type: ignore[no-untyped-def]
    """Values of e4m3 codes that are numbers, subnormals included; their bits as a bf16's own are 2**-120 of them."""
    if BF16:
        values = tl.inline_asm_elementwise(_E4M3, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        wide = codes.to(tl.int16)
        values = _float(((wide << 8) & -0x8000) | ((wide & 0x7F) << 4), BF16)
    return values * _TWO_120


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(  # type: ignore[no-untyped-def]
    codes,
    scales,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    GROUP: tl.constexpr,
    BF16: tl.constexpr,
):
    """Codes `[N, GROUPS * GROUP]` times 2**112 of their block scales `[N, GROUPS]`."""
    if KIND == 3:
        powers = _float(scales.to(tl.int16) << 4, BF16) * _TWO_120
        powers *= _TWO_112
    else:
        powers = _float(scales.to(tl.int16) << 7, BF16)
    blocks = tl.reshape(codes, (ROWS, GROUPS, GROUP)) * powers[:, :, None]
    return tl.reshape(blocks, (ROWS, GROUPS * GROUP))
