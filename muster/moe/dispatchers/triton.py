"""The standard dispatcher's rows on a GPU: three launches, no host waits, the same bits in every run.

`StandardDispatcher` hands over to it where the tokens lie on a GPU. As no host learns how many rows there are,
`x_RD` has as many as there could be; those past the last expert's belong to nobody and hold anything.
"""

from __future__ import annotations

import torch
from torch import Tensor

from muster.moe.backend import ExpertRows, Routed, RowLayout
from muster.moe.dispatch import Dispatched, TokenDispatcher
from muster.workspace import Workspace


class TritonDispatcher(TokenDispatcher):
    """Counts, places and copies by kernels; graph-safe. Triton is imported at its first use."""

    def dispatch(
        self, x_TD: Tensor, routed: Routed, layout: RowLayout, row_block: int, workspace: Workspace
    ) -> Dispatched:
        from muster.moe.kernels import triton_sort as sort

        problem, ids_TK = self.problem, routed.ids_TK
        experts, width = problem.local_experts, x_TD.shape[1]
        places = sort.place(ids_TK, problem.first_expert, experts, workspace)
        rows = sort.capacity(ids_TK.numel(), experts, layout, row_block)
        x_RD = workspace.take("dispatch rows", (rows, width), x_TD.dtype)
        starts_L = workspace.take("row starts", (experts,), torch.int64)
        row_TK = workspace.take("slot rows", tuple(ids_TK.shape), torch.int64)
        on_input = problem.router_weight_on_input
        sort.copy_rows(
            x_TD,
            ids_TK,
            routed.weights_TK if on_input else None,
            places,
            x_RD,
            starts_L,
            row_TK,
            first_expert=problem.first_expert,
            layout=layout,
            row_block=row_block,
        )
        given = ExpertRows(x_RD, starts_L, places.counts_L, layout)
        return Dispatched(given, row_TK, None if on_input else routed.weights_TK)

    def combine(self, y_RD: Tensor, dispatched: Dispatched, out_TD: Tensor, workspace: Workspace) -> None:
        from muster.moe.kernels import triton_sort as sort

        sort.combine(y_RD, dispatched.row_TK, dispatched.weights_TK, out_TD)
