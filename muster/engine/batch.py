"""Scheduled work as the tensors of one step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from muster.attention.interface import AttentionBatch
from muster.engine.scheduler import Work


@dataclass(frozen=True, eq=False)
class Batch:
    """One step: T tokens of which R are the last known ones of their sequences.

    Attributes:
        tokens_T: int64.
        attention: positions, slots and pages.
        rows_R: int64, the tokens whose logits are needed.
    """

    tokens_T: Tensor
    attention: AttentionBatch
    rows_R: Tensor


def build(work: Sequence[Work], page_size: int) -> Batch:
    """The tensors of this work, on the CPU."""
    counts_B = np.array([item.end - item.start for item in work])
    starts_B = np.array([item.start for item in work])
    ends_B = counts_B.cumsum()
    sequence_T = np.repeat(np.arange(len(work)), counts_B)
    positions_T = np.arange(ends_B[-1]) + (starts_B - ends_B + counts_B)[sequence_T]
    pages_BP = _pages(work)
    slots_T = pages_BP[sequence_T, positions_T // page_size].astype(np.int64) * page_size + positions_T % page_size
    return Batch(
        tokens_T=torch.tensor([token for item in work for token in item.request.tokens[item.start : item.end]]),
        attention=AttentionBatch(
            positions_T=torch.from_numpy(positions_T),
            slots_T=torch.from_numpy(slots_T),
            pages_BP=torch.from_numpy(pages_BP),
            query_starts=(0, *ends_B.tolist()),
            lengths=tuple(item.end for item in work),
        ),
        rows_R=torch.tensor(
            [end - 1 for item, end in zip(work, ends_B.tolist(), strict=True) if item.completes], dtype=torch.int64
        ),
    )


def _pages(work: Sequence[Work]) -> np.ndarray[tuple[int, int], np.dtype[np.int32]]:
    tables = [item.request.table.pages for item in work if item.request.table is not None]
    pages_BP = np.zeros((len(work), max(map(len, tables))), dtype=np.int32)
    for row_P, pages in zip(pages_BP, tables, strict=True):
        row_P[: len(pages)] = np.frombuffer(pages, dtype=np.int32)
    return pages_BP
