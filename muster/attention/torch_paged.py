"""Paged grouped-query attention in plain torch: one sequence at a time, so that no sequence sees its neighbours.

Legend as in `interface`, and: Q queries of one sequence, L keys it reads, G query heads per key-value head, R rows of
the cache, one per slot (R = P * S).
"""

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
        rows: its keys in R, oldest first: a slice when its pages are consecutive, else int64 indices.
        visible_QL: bool; None when every key is visible or plain causality says which are.
    """

    queries: slice
    rows: slice | Tensor
    visible_QL: Tensor | None


class TorchPagedAttention:
    """Any shape of step on any torch device, in the dtype of the queries.

    A decode step of B sequences is B small products over the pages as they lie: on two CPU cores that beats padding
    them to one product up to B = 32, and a sequence gets the same bits alone as in company.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._scale = torch.tensor(problem.scale)
        self._batch: AttentionBatch | None = None
        self._reaches: tuple[_Reach, ...] = ()

    def run(
        self, query_TNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, pages: KVPages, batch: AttentionBatch
    ) -> Tensor:
        """Writes the step's keys and values into `pages`, then attends; `[T, N, H]` in the query's dtype.

        What a step reads is worked out once and kept while the same `batch` comes again, once per layer.
        """
        key_RMH, value_RMH = pages.key_PSMH.flatten(0, 1), pages.value_PSMH.flatten(0, 1)
        key_RMH.index_copy_(0, batch.slots_T, key_TMH)
        value_RMH.index_copy_(0, batch.slots_T, value_TMH)
        if batch is not self._batch:
            self._reaches = _reaches(batch, pages.key_PSMH.shape[1], self._problem.window)
            self._batch = batch
        out_TNH = torch.empty(query_TNH.shape, dtype=query_TNH.dtype, device=query_TNH.device)
        for reach in self._reaches:
            key_LMH, value_LMH = _rows(key_RMH, reach.rows), _rows(value_RMH, reach.rows)
            query_QNH, out_QNH = query_TNH[reach.queries], out_TNH[reach.queries]
            if len(query_QNH) == 1:
                self._attend_one(query_QNH, key_LMH, value_LMH, out_QNH)
            else:
                self._attend_many(query_QNH, key_LMH, value_LMH, reach.visible_QL, out_QNH)
        return out_TNH

    def _attend_one(self, query_1NH: Tensor, key_LMH: Tensor, value_LMH: Tensor, out_1NH: Tensor) -> None:
        """A single query sees every key: the query heads of a group are the rows of one product."""
        grouped = (self._problem.kv_heads, -1, self._problem.head_dim)
        query_MGH = query_1NH.mul(self._scale).view(grouped)
        weights_MGL = torch.bmm(query_MGH, key_LMH.permute(1, 2, 0)).softmax(-1)
        torch.bmm(weights_MGL, value_LMH.transpose(0, 1), out=out_1NH.view(grouped))

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


def _rows(cache_RMH: Tensor, rows: slice | Tensor) -> Tensor:
    """Keys or values `[L, M, H]`: a view where the rows follow each other, else gathered."""
    return cache_RMH[rows] if isinstance(rows, slice) else cache_RMH.index_select(0, rows)


def _reaches(batch: AttentionBatch, page_size: int, window: int | None) -> tuple[_Reach, ...]:
    reaches = []
    for row, length in enumerate(batch.lengths):
        queries = slice(batch.query_starts[row], batch.query_starts[row + 1])
        count = queries.stop - queries.start
        if count == 0:
            continue
        first_query = length - count
        first_key = 0 if window is None else max(0, first_query - window + 1)
        rows = _rows_of(batch.pages_BP[row], page_size, first_key, length, batch.slots_T.device)
        visible_QL = _visible(first_query, first_key, length, window, batch.slots_T.device)
        reaches.append(_Reach(queries, rows, visible_QL))
    return tuple(reaches)


def _rows_of(pages_P: Tensor, page_size: int, first_key: int, length: int, device: torch.device) -> slice | Tensor:
    """Where the keys of positions `[first_key, length)` lie; indices are on `device`."""
    first_page, end_page = first_key // page_size, -(-length // page_size)
    pages = pages_P[first_page:end_page].long()
    skipped, count = first_key - first_page * page_size, length - first_key
    if bool((pages.diff() == 1).all()):
        start = int(pages[0]) * page_size + skipped
        return slice(start, start + count)
    offsets = torch.arange(page_size, device=pages.device)
    return (pages.unsqueeze(1) * page_size + offsets).flatten()[skipped : skipped + count].to(device)


def _visible(first_query: int, first_key: int, length: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which keys each query sees; None for one query, and for a whole sequence that its window does not cut."""
    if first_query == length - 1 or (first_query == 0 and (window is None or length <= window)):
        return None
    query_Q1 = torch.arange(first_query, length, device=device).unsqueeze(1)
    key_L = torch.arange(first_key, length, device=device)
    visible_QL = key_L <= query_Q1
    return visible_QL if window is None else visible_QL & (key_L > query_Q1 - window)
