"""Paged grouped-query attention in plain torch: one sequence at a time, so that no sequence sees its neighbours."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from muster.attention.interface import AttentionBatch, AttentionProblem, KVPages


@dataclass(frozen=True, eq=False)
class _Reach:
    """What one sequence reads in a step.

    Attributes:
        queries: its tokens in T.
        rows: its keys, in page rows if `pages` is None (they lie one after the other), else in the gathered rows.
        pages: the pages to gather, int64; None when they are consecutive.
        visible: bool `[queries, keys]`; None when every key is visible or plain causality says which are.
    """

    queries: slice
    rows: slice
    pages: Tensor | None
    visible: Tensor | None


class TorchPagedAttention:
    """Any shape of step on any torch device, in the dtype of the queries.

    A decode step of B sequences is B small products over the pages as they lie: on two CPU cores that beats padding
    them to one product up to B = 32, and a sequence gets the same bits alone as in company.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._batch: AttentionBatch | None = None
        self._reaches: tuple[_Reach, ...] = ()

    def run(
        self, query_TNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, pages: KVPages, batch: AttentionBatch
    ) -> Tensor:
        """Writes the step's keys and values into `pages`, then attends; `[T, N, H]` in the query's dtype.

        What a step reads is worked out once and kept while the same `batch` comes again, once per layer.
        """
        pages.key_PSMH.flatten(0, 1).index_copy_(0, batch.slots_T, key_TMH)
        pages.value_PSMH.flatten(0, 1).index_copy_(0, batch.slots_T, value_TMH)
        if batch is not self._batch:
            self._reaches = _reaches(batch, pages.key_PSMH.shape[1], self._problem.window)
            self._batch = batch
        out_TNH = torch.empty_like(query_TNH, memory_format=torch.contiguous_format)
        for reach in self._reaches:
            key_LMH, value_LMH = _rows(pages.key_PSMH, reach), _rows(pages.value_PSMH, reach)
            query_QNH, out_QNH = query_TNH[reach.queries], out_TNH[reach.queries]
            if query_QNH.shape[0] == 1:
                self._attend_one(query_QNH, key_LMH, value_LMH, out_QNH)
            else:
                self._attend_many(query_QNH, key_LMH, value_LMH, reach.visible, out_QNH)
        return out_TNH

    def _attend_one(self, query_1NH: Tensor, key_LMH: Tensor, value_LMH: Tensor, out_1NH: Tensor) -> None:
        """A single query sees every key: the query heads of a group are the rows of one product."""
        grouped = (self._problem.kv_heads, -1, self._problem.head_dim)
        scores_MGL = torch.bmm((query_1NH * self._problem.scale).view(grouped), key_LMH.permute(1, 2, 0))
        torch.bmm(torch.softmax(scores_MGL, -1), value_LMH.transpose(0, 1), out=out_1NH.view(grouped))

    def _attend_many(
        self, query_QNH: Tensor, key_LMH: Tensor, value_LMH: Tensor, visible_QL: Tensor | None, out_QNH: Tensor
    ) -> None:
        out_NQH = scaled_dot_product_attention(
            query_QNH.transpose(0, 1).unsqueeze(0),
            key_LMH.transpose(0, 1).unsqueeze(0),
            value_LMH.transpose(0, 1).unsqueeze(0),
            attn_mask=visible_QL,
            is_causal=visible_QL is None,
            scale=self._problem.scale,
            enable_gqa=self._problem.heads != self._problem.kv_heads,
        ).squeeze(0)
        out_QNH.copy_(out_NQH.transpose(0, 1))


def _rows(cache_PSMH: Tensor, reach: _Reach) -> Tensor:
    """The keys or values that `reach` names, `[L, M, H]`; a view when its pages are consecutive."""
    if reach.pages is not None:
        cache_PSMH = cache_PSMH.index_select(0, reach.pages)
    return cache_PSMH.flatten(0, 1)[reach.rows]


def _reaches(batch: AttentionBatch, page_size: int, window: int | None) -> tuple[_Reach, ...]:
    reaches = []
    for row, length in enumerate(batch.lengths):
        queries = slice(batch.query_starts[row], batch.query_starts[row + 1])
        count = queries.stop - queries.start
        if count == 0:
            continue
        first_query = length - count
        first_key = 0 if window is None else max(0, first_query - window + 1)
        first_page, end_page = first_key // page_size, -(-length // page_size)
        pages = batch.pages_BP[row, first_page:end_page].long()
        start, shift = int(pages[0]), first_page * page_size
        consecutive = bool((pages == torch.arange(start, start + len(pages), device=pages.device)).all())
        offset = (start * page_size if consecutive else 0) - shift
        reaches.append(
            _Reach(
                queries,
                slice(first_key + offset, length + offset),
                None if consecutive else pages,
                _visible(first_query, count, first_key, length, window, batch.slots_T.device),
            )
        )
    return tuple(reaches)


def _visible(
    first_query: int, count: int, first_key: int, length: int, window: int | None, device: torch.device
) -> Tensor | None:
    """Which keys each query sees; None for one query, and for a whole sequence that its window does not cut."""
    if count == 1 or (first_query == 0 and (window is None or length <= window)):
        return None
    query_Q1 = torch.arange(first_query, length, device=device).unsqueeze(1)
    key_L = torch.arange(first_key, length, device=device)
    visible_QL = key_L <= query_Q1
    return visible_QL if window is None else visible_QL & (key_L > query_Q1 - window)
