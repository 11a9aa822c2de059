"""Paged grouped-query attention for decode steps on a CPU: one kernel per layer, whatever the number of sequences.

Legend as in `interface`, and: Q sequences that have one query in the step.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from muster.attention.interface import AttentionBatch, AttentionProblem, KVPages
from muster.attention.torch_paged import TorchPagedAttention
from muster.native import available, team
from muster.native.jit import F32, I32, I64, LANES, Emitter, F32x8, Kernel, Target, Value, host
from muster.native.mathematics import exp

_WORTH_A_TEAM = 128
"""Keys below which waking the other threads takes longer than the work."""


def reads(problem: AttentionProblem) -> bool:
    """Whether `CpuPagedAttention` computes this problem here: heads of whole vectors, and a compiler."""
    return problem.head_dim % LANES == 0 and available()


@dataclass(frozen=True, eq=False)
class _Split:
    """A step's sequences: those with one query for the kernel, the rest as a step of their own.

    Attributes:
        single_3Q: int64, of each of the former: its token, its row in `pages_BP`, its length.
        longest: the largest of these lengths.
        others_T: int64, the tokens of the rest; None when there are none.
        others: their step.
    """

    single_3Q: Tensor
    longest: int
    others_T: Tensor | None
    others: AttentionBatch | None


class CpuPagedAttention:
    """Float32 decode steps in one kernel; sequences with several queries go to torch's products.

    Each head of each sequence is one thread's work, so a sequence gets the same bits alone as in company.
    """

    def __init__(self, problem: AttentionProblem) -> None:
        self._problem = problem
        self._torch = TorchPagedAttention(problem)
        self._batch: AttentionBatch | None = None
        self._split = _Split(torch.empty(3, 0, dtype=torch.int64), 0, None, None)
        self._scores = torch.empty(0)

    def run(
        self, query_TNH: Tensor, key_TMH: Tensor, value_TMH: Tensor, pages: KVPages, batch: AttentionBatch
    ) -> Tensor:
        """Writes the step's keys and values into `pages`, then attends; `[T, N, H]` in the query's dtype."""
        if batch is not self._batch:
            self._split = _split(batch)
            self._batch = batch
        split = self._split
        if not split.longest:
            return self._torch.run(query_TNH, key_TMH, value_TMH, pages, batch)
        out_TNH = torch.empty(query_TNH.shape)
        self._attend(query_TNH, key_TMH, value_TMH, pages, batch, out_TNH)
        if split.others_T is not None and split.others is not None:
            query, key, value = (t.index_select(0, split.others_T) for t in (query_TNH, key_TMH, value_TMH))
            out_TNH.index_copy_(0, split.others_T, self._torch.run(query, key, value, pages, split.others))
        return out_TNH

    def _attend(
        self,
        query_TNH: Tensor,
        key_TMH: Tensor,
        value_TMH: Tensor,
        pages: KVPages,
        batch: AttentionBatch,
        out_TNH: Tensor,
    ) -> None:
        single_3Q = self._split.single_3Q
        stride = -(-self._split.longest // LANES) * LANES
        if self._scores.numel() < stride * torch.get_num_threads():
            self._scores = torch.empty(2 * stride * torch.get_num_threads())
        inputs = (query_TNH, key_TMH, value_TMH)
        arguments = (
            single_3Q.shape[1],
            single_3Q.data_ptr(),
            *(tensor.data_ptr() for tensor in inputs),
            *(4 * tensor.stride(0) for tensor in inputs),
            pages.key_PSMH.data_ptr(),
            pages.value_PSMH.data_ptr(),
            batch.slots_T.data_ptr(),
            batch.pages_BP.data_ptr(),
            4 * batch.pages_BP.stride(0),
            out_TNH.data_ptr(),
            self._scores.data_ptr(),
            4 * stride,
        )
        kernel = attention_kernel(self._problem, pages.key_PSMH.shape[1], host())
        team.team().run(kernel, arguments, alone=single_3Q.shape[1] * self._split.longest < _WORTH_A_TEAM)


def _split(batch: AttentionBatch) -> _Split:
    starts = batch.query_starts
    counts = [stop - start for start, stop in pairwise(starts)]
    single = [(starts[row], row, batch.lengths[row]) for row, count in enumerate(counts) if count == 1]
    single_3Q = torch.tensor(single, dtype=torch.int64).view(-1, 3).T.contiguous()
    longest = max((length for _, _, length in single), default=0)
    rows = [row for row, count in enumerate(counts) if count > 1]
    if not rows or not single:
        return _Split(single_3Q, longest, None, None)
    others_T = torch.cat([torch.arange(starts[row], starts[row + 1]) for row in rows])
    ends = torch.tensor([counts[row] for row in rows]).cumsum(0).tolist()
    others = AttentionBatch(
        positions_T=batch.positions_T[others_T],
        slots_T=batch.slots_T[others_T],
        pages_BP=batch.pages_BP[rows],
        query_starts=(0, *ends),
        lengths=tuple(batch.lengths[row] for row in rows),
    )
    return _Split(single_3Q, longest, others_T, others)


@dataclass(frozen=True, eq=False)
class _Frame:
    """The arguments of one call, in their order: counts, addresses and strides in bytes."""

    count: Value
    single: Value
    query: Value
    key: Value
    value: Value
    query_stride: Value
    key_stride: Value
    value_stride: Value
    key_cache: Value
    value_cache: Value
    slots: Value
    pages: Value
    pages_stride: Value
    out: Value
    scores: Value
    scores_stride: Value


@cache
def attention_kernel(problem: AttentionProblem, page_size: int, target: Target) -> Kernel:
    """Arguments: `_Frame`. Writes the new keys and values, then gives each (sequence, head) to one thread."""
    e = Emitter("attention", target)
    thread, threads = team.member(e)
    frame = _Frame(*(e.argument(team.RESERVED + slot) for slot in range(16)))
    with e.loop(frame.count * thread // threads, frame.count * (thread + 1) // threads) as q:
        _write(e, problem, frame, e.load(I64, frame.single + q * 8))
    team.barrier(e, threads)
    items = frame.count * problem.heads
    with e.loop(items * thread // threads, items * (thread + 1) // threads) as item:
        scores = frame.scores + thread * frame.scores_stride
        _attend(e, problem, page_size, frame, scores, item // problem.heads, item % problem.heads)
    return e.compile()


def _write(e: Emitter, problem: AttentionProblem, frame: _Frame, token: Value) -> None:
    """A token's key and value into its slot."""
    row = problem.kv_heads * problem.head_dim
    slot = e.load(I64, frame.slots + token * 8) * (4 * row)
    pairs = (
        (frame.key + token * frame.key_stride, frame.key_cache),
        (frame.value + token * frame.value_stride, frame.value_cache),
    )
    with e.loop(0, 4 * row, 4 * LANES) as place:
        for source, cached in pairs:
            e.store(e.load(F32x8, source + place), cached + slot + place)


def _attend(
    e: Emitter, problem: AttentionProblem, page_size: int, frame: _Frame, scores: Value, q: Value, head: Value
) -> None:
    token, row, length = (e.load(I64, frame.single + (q + frame.count * part) * 8) for part in range(3))
    first = e.constant(I64, 0)
    if problem.window is not None:
        behind = e.constant(I64, problem.window)
        first = e.select(length.compare(">", behind), length - behind, first)
    vectors = range(problem.head_dim // LANES)
    query = frame.query + token * frame.query_stride + head * (4 * problem.head_dim)
    query_vectors = [e.load(F32x8, query, 4 * LANES * i) * problem.scale for i in vectors]
    offset = head // (problem.heads // problem.kv_heads) * (4 * problem.head_dim)
    pages = frame.pages + row * frame.pages_stride

    largest = e.variable(e.constant(F32, -3.0e38))
    with _keys(e, problem, page_size, pages, first, length) as (position, place):
        key = frame.key_cache + place + offset
        halves = [e.constant(F32x8, 0), e.constant(F32x8, 0)]
        for i in vectors:
            halves[i % 2] = e.fma(query_vectors[i], e.load(F32x8, key, 4 * LANES * i), halves[i % 2])
        score = e.sum_lanes(halves[0] + halves[1])
        e.store(score, scores + (position - first) * 4)
        largest.set(e.maximum(largest.get(), score))

    total = _weigh(e, scores, length - first, largest.get())

    sums = [e.variable(e.constant(F32x8, 0)) for _ in vectors]
    with _keys(e, problem, page_size, pages, first, length) as (position, place):
        value = frame.value_cache + place + offset
        weight = e.splat(e.load(F32, scores + (position - first) * 4), LANES)
        for i in vectors:
            sums[i].set(e.fma(weight, e.load(F32x8, value, 4 * LANES * i), sums[i].get()))
    out = frame.out + (token * problem.heads + head) * (4 * problem.head_dim)
    for i in vectors:
        e.store(sums[i].get() / e.splat(total, LANES), out, 4 * LANES * i)


def _weigh(e: Emitter, scores: Value, count: Value, largest: Value) -> Value:
    """Scores become e**(score - largest); returns their sum. The last vector is filled up with scores of no weight."""
    whole = (count + (LANES - 1)) & ~(LANES - 1)
    with e.loop(count, whole) as place:
        e.store(e.constant(F32, -3.0e38), scores + place * 4)
    shift = e.splat(largest, LANES)
    sums = e.variable(e.constant(F32x8, 0))
    with e.loop(0, whole, LANES) as place:
        weights = exp(e, e.load(F32x8, scores + place * 4) - shift)
        e.store(weights, scores + place * 4)
        sums.set(sums.get() + weights)
    return e.sum_lanes(sums.get())


@contextmanager
def _keys(
    e: Emitter, problem: AttentionProblem, page_size: int, pages: Value, first: Value, length: Value
) -> Iterator[tuple[Value, Value]]:
    """For each position in `[first, length)`: itself, and where its row of the cache begins, in bytes."""
    row = 4 * problem.kv_heads * problem.head_dim
    with e.loop(first // page_size, (length + (page_size - 1)) // page_size) as index:
        page = e.extend(e.load(I32, pages + index * 4), I64)
        begin = index * page_size
        start = e.maximum(begin, first)
        stop = e.minimum(begin + page_size, length)
        with e.loop(start, stop) as position:
            yield position, (page * page_size + position - begin) * row
