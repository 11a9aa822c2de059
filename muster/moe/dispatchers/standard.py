"""The standard dispatcher: every expert of this rank lies on this device, so that moving tokens is a gather."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from muster.moe.backend import ExpertRows, Routed, RowLayout
from muster.moe.dispatch import Dispatched, TokenDispatcher
from muster.moe.dispatchers.triton import TritonDispatcher
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace


@dataclass(frozen=True, eq=False)
class _Grouping:
    """Slots in row order: `slots_R` index the flattened `[T, K]`, `experts_R` are their local experts."""

    slots_R: Tensor
    experts_R: Tensor
    counts_L: Tensor


class StandardDispatcher(TokenDispatcher):
    """Groups by a stable sort of the expert ids, combines by one gather per slot; on a GPU kernels do both."""

    def __init__(self, problem: MoEProblem) -> None:
        super().__init__(problem)
        self._kernels = TritonDispatcher(problem)

    def dispatch(
        self, x_TD: Tensor, routed: Routed, layout: RowLayout, row_block: int, workspace: Workspace
    ) -> Dispatched:
        if x_TD.is_cuda and _has_triton():
            return self._kernels.dispatch(x_TD, routed, layout, row_block, workspace)
        grouping = self._group(routed.ids_TK)
        starts_L, total = _lay_out(grouping.counts_L, layout, row_block)
        first_L = grouping.counts_L.cumsum(0) - grouping.counts_L
        rank_R = torch.arange(len(grouping.slots_R), device=x_TD.device)
        row_R = rank_R + (starts_L - first_L)[grouping.experts_R]

        x_RD = workspace.take("dispatch rows", (total, x_TD.shape[1]), x_TD.dtype)
        if total > len(row_R):
            x_RD.zero_()
        token_R = grouping.slots_R // routed.ids_TK.shape[1]
        x_real = x_TD.index_select(0, token_R)
        if self.problem.router_weight_on_input:
            x_real.copy_(x_real.float().mul_(routed.weights_TK.flatten()[grouping.slots_R, None]))
        x_RD.index_copy_(0, row_R, x_real)

        row_TK = torch.full_like(routed.ids_TK, -1)
        row_TK.view(-1)[grouping.slots_R] = row_R
        weights_TK = None if self.problem.router_weight_on_input else routed.weights_TK
        return Dispatched(ExpertRows(x_RD, starts_L, grouping.counts_L, layout), row_TK, weights_TK)

    def combine(self, y_RD: Tensor, dispatched: Dispatched, out_TD: Tensor, workspace: Workspace) -> None:
        if y_RD.is_cuda and _has_triton():
            self._kernels.combine(y_RD, dispatched, out_TD, workspace)
            return
        if not len(y_RD):
            out_TD.zero_()
            return
        sum_TD = out_TD if out_TD.dtype is torch.float32 else workspace.take("sum", out_TD.shape, torch.float32)
        sum_TD.zero_()
        for slot, row_T in enumerate(dispatched.row_TK.unbind(1)):
            y_TD = y_RD.index_select(0, row_T.clamp_min(0)).float()
            if dispatched.weights_TK is not None:
                y_TD.mul_(dispatched.weights_TK[:, slot, None])
            # A slot without a row has read row 0 of another token, which may hold NaN: fill, do not multiply by zero.
            sum_TD.add_(y_TD.masked_fill_((row_T < 0)[:, None], 0.0))
        if sum_TD is not out_TD:
            out_TD.copy_(sum_TD)

    def _group(self, ids_TK: Tensor) -> _Grouping:
        experts = self.problem.local_experts
        local = ids_TK.flatten() - self.problem.first_expert
        local = local.masked_fill((local < 0) | (local >= experts), experts)
        sorted_experts, slots = local.sort(stable=True)
        counts = torch.bincount(local, minlength=experts + 1)[:experts]
        real = int(counts.sum())
        return _Grouping(slots[:real], sorted_experts[:real], counts)


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _lay_out(counts_L: Tensor, layout: RowLayout, row_block: int) -> tuple[Tensor, int]:
    """First row of each expert, and how many rows there are in all."""
    block = 1 if layout is RowLayout.SORTED else row_block
    room_L = (counts_L + block - 1) // block * block
    if layout is RowLayout.MASKED:
        room_L = room_L.max().expand(len(counts_L))
    ends_L = room_L.cumsum(0)
    return ends_L - room_L, int(ends_L[-1])
