"""Blocks of slots of one expert each, made on the device: no sort, no question to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from muster.moe.backend import ExpertRows
from muster.moe.kernels.triton_sort import place
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace

FEW_SLOTS = 128
"""Up to so many slots each finds its own block by looking at all others, in one launch."""
_SPAN = 16
"""Slots per program that places them."""


@dataclass(frozen=True, eq=False)
class Blocks:
    """Slots of one expert, so many at a time.

    Attributes:
        slots: int32 `[B, rows]`, -1 where there is none.
        experts: int32 `[B]`, -1 for a block that does not exist.
    """

    slots: Tensor
    experts: Tensor


def group(problem: MoEProblem, ids_TK: Tensor, rows: int, workspace: Workspace) -> Blocks:
    """Blocks of `rows` slots of the local experts; one launch for few slots, else two."""
    count = ids_TK.numel()
    few = count <= FEW_SLOTS
    number = count if few else min(count, problem.local_experts + count // rows)
    blocks = Blocks(
        workspace.take("triton block slots", (number, rows), torch.int32),
        workspace.take("triton block experts", (number,), torch.int32),
    )
    if not few:
        list_blocks(problem, ids_TK, blocks.slots, blocks.experts, workspace)
        return blocks
    group_kernel[(count,)](
        ids_TK,
        blocks.slots,
        blocks.experts,
        count,
        problem.first_expert,
        problem.local_experts,
        SLOTS=max(16, 1 << (count - 1).bit_length()),
        BLOCK_M=rows,
        num_warps=1,
    )
    return blocks


def list_blocks(problem: MoEProblem, ids_TK: Tensor, slots: Tensor, experts: Tensor, workspace: Workspace) -> None:
    """Fills int32 `slots` `[B, rows]` and `experts` `[B]`: each local expert's slots, `rows` at a time, in order."""
    number, rows = slots.shape
    count = ids_TK.numel()
    places = place(ids_TK, problem.first_expert, problem.local_experts, workspace)
    programs = -(-count // _SPAN)
    list_kernel[(programs + problem.local_experts,)](
        ids_TK,
        places.rank_TK,
        places.counts_L,
        slots,
        experts,
        count,
        problem.first_expert,
        number,
        SLOT_PROGRAMS=programs,
        LOCAL=problem.local_experts,
        LOCAL_2=max(16, 1 << (problem.local_experts - 1).bit_length()),
        SPAN=_SPAN,
        BLOCK_M=rows,
        num_warps=4,
    )


def row_blocks(rows: ExpertRows, size: int) -> Blocks:
    """Blocks of padded rows: those past an expert's real ones are left out, without asking the host."""
    row = torch.arange(len(rows.x_RD), device=rows.x_RD.device)
    expert = torch.searchsorted(rows.starts_L, row, right=True) - 1
    real = row < (rows.starts_L + rows.counts_L)[expert]
    slots = torch.where(real, row, -1).to(torch.int32)
    experts = torch.where(real, expert, -1)[::size].to(torch.int32)
    return Blocks(slots.contiguous(), experts.contiguous())


@triton.jit  # type: ignore[untyped-decorator]
def group_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    slots_ptr,
    experts_ptr,
    count,
    first,
    local,
    SLOTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """One program per slot. Every BLOCK_M-th slot of an expert heads a block and lists it; the others' are empty.

    No sorting: each program compares its own expert with those of all `count` slots (a few hundred at most).
    """
    slot = tl.program_id(0)
    expert = tl.load(ids_ptr + slot) - first
    here = (expert >= 0) & (expert < local)
    span = tl.arange(0, SLOTS)
    others = tl.load(ids_ptr + span, mask=span < count, other=0) - first
    same = (others == expert) & (span < count)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    mine = tl.sum((same & (span < slot)).to(tl.int32), 0)
    heads = here & (mine % BLOCK_M == 0)
    tl.store(experts_ptr + slot, tl.where(heads, expert, -1).to(tl.int32))
    if heads:
        size = tl.sum(same.to(tl.int32), 0)
        places = tl.arange(0, BLOCK_M)
        tl.store(slots_ptr + slot * BLOCK_M + places, tl.full((BLOCK_M,), -1, tl.int32), mask=mine + places >= size)
        inside = same & (rank >= mine) & (rank < mine + BLOCK_M)
        tl.store(slots_ptr + slot * BLOCK_M + rank - mine, span, mask=inside)


@triton.jit  # type: ignore[untyped-decorator]
def list_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    rank_ptr,
    counts_ptr,
    slots_ptr,
    experts_ptr,
    count,
    first,
    blocks,
    SLOT_PROGRAMS: tl.constexpr,
    LOCAL: tl.constexpr,
    LOCAL_2: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Blocks of slots from each slot's number within its expert: first the slots find their places, then the experts
    name their blocks and fill the places that are left.
    """
    program = tl.program_id(0)
    locals_L = tl.arange(0, LOCAL_2)
    rows_L = tl.load(counts_ptr + locals_L, mask=locals_L < LOCAL, other=0).to(tl.int32)
    blocks_L = tl.cdiv(rows_L, BLOCK_M)
    if program < SLOT_PROGRAMS:
        slots_S = program * SPAN + tl.arange(0, SPAN)
        experts_S = tl.load(ids_ptr + slots_S, mask=slots_S < count, other=-1) - first
        here_S = (experts_S >= 0) & (experts_S < LOCAL)
        before_S = tl.sum(tl.where(locals_L[None, :] < experts_S[:, None], blocks_L[None, :], 0), axis=1)
        ranks_S = tl.load(rank_ptr + slots_S, mask=here_S, other=0)
        tl.store(slots_ptr + before_S * BLOCK_M + ranks_S, slots_S, mask=here_S)
    else:
        local = program - SLOT_PROGRAMS
        start = tl.sum(tl.where(locals_L < local, blocks_L, 0), axis=0)
        rows = tl.sum(tl.where(locals_L == local, rows_L, 0), axis=0)
        end = start + tl.cdiv(rows, BLOCK_M)
        for block in range(start, end):
            tl.store(experts_ptr + block, local)
        places = tl.arange(0, BLOCK_M)
        if rows > 0:
            at = (end - 1) * BLOCK_M + places
            tl.store(slots_ptr + at, tl.full((BLOCK_M,), -1, tl.int32), mask=at >= start * BLOCK_M + rows)
        if local == LOCAL - 1:
            for block in range(end, blocks):
                tl.store(experts_ptr + block, -1)
