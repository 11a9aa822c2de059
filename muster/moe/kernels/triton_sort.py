"""Rows for the experts on a GPU without asking the host: count, place, copy; and the weighted way back.

`place` needs no exchange between programs: each expert's program reads all ids, counts its own and numbers them in
slot order, which a prefix sum in registers gives. Nothing depends on timing, so every run gives the same rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muster.moe.backend import RowLayout
from muster.workspace import Workspace

_IDS = 8192
"""Ids that a program reads at a time, at most."""
_IDS_OF_WARP = 512
"""Of which a warp takes so many, beyond four warps."""
_WIDTH = 1024
"""Columns that a program copies or sums, at most."""


@dataclass(frozen=True, eq=False)
class Places:
    """Where each slot's row stands among those of its expert.

    Attributes:
        rank_TK: int32, the row's number within its expert; undefined where the slot is computed elsewhere.
        counts_L: int64, rows of each local expert.
    """

    rank_TK: Tensor
    counts_L: Tensor


def capacity(slots: int, experts: int, layout: RowLayout, row_block: int) -> int:
    """Rows that suffice whatever the ids are: no host waits to learn how many there will be."""
    if layout is RowLayout.SORTED:
        return slots
    if layout is RowLayout.PADDED:
        return -(-(slots + min(slots, experts) * (row_block - 1)) // row_block) * row_block
    return experts * room(slots, row_block)


def room(slots: int, row_block: int) -> int:
    """Rows that every expert owns in the masked layout: ids may repeat, so that one may get all slots."""
    return -(-slots // row_block) * row_block


def place(ids_TK: Tensor, first_expert: int, experts: int, workspace: Workspace) -> Places:
    """Numbers the slots of each expert of `[first_expert, first_expert + experts)`, in slot order; one launch."""
    counts_L = workspace.take("row counts", (experts,), torch.int64)
    rank_TK = workspace.take("row ranks", tuple(ids_TK.shape), torch.int32)
    slots = ids_TK.numel()
    block = max(16, min(_IDS, triton.next_power_of_2(max(slots, 1))))
    _place[(experts,)](
        ids_TK, rank_TK, counts_L, slots, first_expert, BLOCK=block, num_warps=max(4, block // _IDS_OF_WARP)
    )
    return Places(rank_TK, counts_L)


def copy_rows(
    x_TD: Tensor,
    ids_TK: Tensor,
    weights_TK: Tensor | None,
    places: Places,
    x_RD: Tensor,
    starts_L: Tensor,
    row_TK: Tensor,
    *,
    first_expert: int,
    layout: RowLayout,
    row_block: int,
) -> None:
    """Fills `starts_L`, `row_TK` (-1: computed elsewhere) and every row of `x_RD` that an expert owns; one launch.

    Args:
        x_TD: tokens.
        ids_TK: their experts, int64.
        weights_TK: float32, multiplied into the rows; None: not.
        places: of the same ids.
        x_RD: of `capacity` rows; those that no expert owns are left alone.
        starts_L: int64, the first row of each expert.
        row_TK: int64, the row of each slot.
        first_expert: of this rank.
        layout: how rows lie.
        row_block: row alignment of each expert in the padded and the masked layout.
    """
    slots, width, experts = ids_TK.numel(), x_TD.shape[1], len(starts_L)
    block = min(_WIDTH, triton.next_power_of_2(width))
    block_l = triton.next_power_of_2(experts)
    masked = layout is RowLayout.MASKED
    _copy[(slots + experts, triton.cdiv(width, block))](
        x_TD,
        ids_TK,
        x_TD if weights_TK is None else weights_TK,
        places.rank_TK,
        places.counts_L,
        x_RD,
        starts_L,
        row_TK,
        slots,
        width,
        first_expert,
        room(slots, row_block) if masked else 0,
        TOP_K=ids_TK.shape[1],
        EXPERTS=experts,
        BLOCK_L=block_l,
        ROW_BLOCK=1 if layout is RowLayout.SORTED else row_block,
        MASKED=masked,
        WEIGHTED=weights_TK is not None,
        BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )


def combine(y_RD: Tensor, row_TK: Tensor, weights_TK: Tensor | None, out_TD: Tensor) -> None:
    """Writes each token's weighted rows, summed in float32 in slot order; one launch. Tokens without a row get zeros.

    Args:
        y_RD: what the experts gave; rows that `row_TK` does not name are not read.
        row_TK: int64, -1: none.
        weights_TK: float32; None: the rows as they are.
        out_TD: all of it is written.
    """
    tokens, width = out_TD.shape
    if not tokens:
        return
    block = min(_WIDTH, triton.next_power_of_2(width))
    _combine[(tokens, triton.cdiv(width, block))](
        y_RD,
        row_TK,
        row_TK if weights_TK is None else weights_TK,
        out_TD,
        width,
        TOP_K=row_TK.shape[1],
        WEIGHTED=weights_TK is not None,
        BLOCK=block,
        num_warps=4 if block > 256 else 1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _place(ids_TK, rank_TK, counts_L, slots, first_expert, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    local = tl.program_id(0)
    mine = (first_expert + local).to(tl.int64)
    count = tl.zeros((), tl.int32)
    for start in range(0, slots, BLOCK):
        slot = start + tl.arange(0, BLOCK)
        there = slot < slots
        hit = there & (tl.load(ids_TK + slot, mask=there, other=-1) == mine)
        ones = hit.to(tl.int32)
        tl.store(rank_TK + slot, count + tl.cumsum(ones, axis=0) - ones, mask=hit)
        count += tl.sum(ones, axis=0)
    tl.store(counts_L + local, count.to(tl.int64))


@triton.jit  # type: ignore[untyped-decorator]
def _copy(  # type: ignore[no-untyped-def]
    x_TD,
    ids_TK,
    weights_TK,
    rank_TK,
    counts_L,
    x_RD,
    starts_L,
    row_TK,
    slots,
    width,
    first_expert,
    room,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
    WEIGHTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The first programs copy a slot each, the others zero the rows that an expert owns and no slot fills."""
    program = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    if program < slots:
        local = tl.load(ids_TK + program) - first_expert
        here = (local >= 0) & (local < EXPERTS)
        start, _ = _start(counts_L, tl.where(here, local, 0), room, EXPERTS, BLOCK_L, ROW_BLOCK, MASKED)
        row = tl.where(here, start + tl.load(rank_TK + program, mask=here, other=0), -1)
        if tl.program_id(1) == 0:
            tl.store(row_TK + program, row)
        if here:
            x = tl.load(x_TD + (program // TOP_K).to(tl.int64) * width + column, mask=inside, other=0.0)
            if WEIGHTED:
                x = (x.to(tl.float32) * tl.load(weights_TK + program)).to(x.dtype)
            tl.store(x_RD + row * width + column, x, mask=inside)
    else:
        local = (program - slots).to(tl.int64)
        start, owned = _start(counts_L, local, room, EXPERTS, BLOCK_L, ROW_BLOCK, MASKED)
        if tl.program_id(1) == 0:
            tl.store(starts_L + local, start)
        for row in range(tl.load(counts_L + local), owned):
            zeros = tl.zeros((BLOCK,), x_RD.dtype.element_ty)
            tl.store(x_RD + (start + row) * width + column, zeros, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def _start(  # type: ignore[no-untyped-def]
    counts_L,
    local,
    room,
    EXPERTS: tl.constexpr,
    BLOCK_L: tl.constexpr,
    ROW_BLOCK: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The first row of an expert, and how many rows it owns; both int64."""
    if MASKED:
        return local * room, tl.cast(room, tl.int64)
    expert = tl.arange(0, BLOCK_L)
    counts = tl.load(counts_L + expert, mask=expert < EXPERTS, other=0)
    owned = (counts + (ROW_BLOCK - 1)) // ROW_BLOCK * ROW_BLOCK
    start = tl.sum(tl.where(expert < local, owned, 0), axis=0)
    return start, tl.sum(tl.where(expert == local, owned, 0), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def _combine(  # type: ignore[no-untyped-def]
    y_RD, row_TK, weights_TK, out_TD, width, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr
):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for k in tl.static_range(TOP_K):
        row = tl.load(row_TK + token * TOP_K + k)
        reach = tl.where(row >= 0, width, 0)
        y = tl.load(y_RD + row * width + column, mask=column < reach, other=0.0).to(tl.float32)
        if WEIGHTED:
            # A slot without a row may have any weight, NaN too.
            y *= tl.where(row >= 0, tl.load(weights_TK + token * TOP_K + k), 0.0)
        total += y
    tl.store(out_TD + token * width + column, total.to(out_TD.dtype.element_ty), mask=inside)
