"""Attention over a paged key-value cache: what a step looks like, and what an attention backend must answer.

Legend: T tokens of this step over all sequences, B sequences, N query heads, M key-value heads, H head size,
P pages, S page size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class AttentionProblem:
    """One grouped-query attention layer: `window` is the number of last tokens seen (itself included), None: all."""

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None


@dataclass(frozen=True, eq=False)
class AttentionBatch:
    """The tokens of one step, sequence after sequence.

    Attributes:
        positions_T: int64, position of each token in its sequence.
        slots_T: int64, `page * S + offset` where each token's key and value are written.
        pages_BP: int32, the pages of each sequence in order, padded with 0 (a page's meaning ends at the length);
            in main memory wherever the rest is.
        query_starts: B + 1 offsets into T.
        lengths: per sequence, tokens in the cache once this step's are written.
    """

    positions_T: Tensor
    slots_T: Tensor
    pages_BP: Tensor
    query_starts: tuple[int, ...]
    lengths: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class KVPages:
    """One layer's cache: `key_PSMH` and `value_PSMH`."""

    key_PSMH: Tensor
    value_PSMH: Tensor


class PagedAttention(Protocol):
    """Writes this step's keys and values into the pages, then attends, causally within each sequence."""

    def run(
        self, query_TNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, pages: KVPages, batch: AttentionBatch
    ) -> Tensor:
        """Returns `[T, N, H]` in the query's dtype."""
        ...
