from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from muster.attention.cpu_paged import CpuPagedAttention
from muster.attention.interface import AttentionBatch, AttentionProblem, KVPages, PagedAttention
from muster.attention.torch_paged import TorchPagedAttention

PAGES, PAGE_SIZE = 40, 4


@dataclass
class Sequence:
    """The full keys, values and queries of one sequence, its pages, and how much of it is already written."""

    query: Tensor
    key: Tensor
    value: Tensor
    pages: list[int]
    done: int = 0


@dataclass
class Machine:
    """A cache full of NaN, and an attention that steps sequences through it."""

    kind: ClassVar[Callable[[AttentionProblem], PagedAttention]]
    problem: AttentionProblem
    attention: PagedAttention = field(init=False)
    cache: KVPages = field(init=False)

    def __post_init__(self) -> None:
        shape = (PAGES, PAGE_SIZE, self.problem.kv_heads, self.problem.head_dim)
        self.attention = Machine.kind(self.problem)
        self.cache = KVPages(torch.full(shape, torch.nan), torch.full(shape, torch.nan))

    def step(self, work: list[tuple[Sequence, int]]) -> list[Tensor]:
        spans = [slice(sequence.done, sequence.done + count) for sequence, count in work]
        positions = [torch.arange(span.start, span.stop) for span in spans]
        slots = [
            torch.tensor(sequence.pages)[position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
            for (sequence, _), position in zip(work, positions, strict=True)
        ]
        width = max(len(sequence.pages) for sequence, _ in work)
        starts = [0]
        for _, count in work:
            starts.append(starts[-1] + count)
        batch = AttentionBatch(
            torch.cat(positions),
            torch.cat(slots),
            torch.tensor([s.pages + [0] * (width - len(s.pages)) for s, _ in work], dtype=torch.int32),
            tuple(starts),
            tuple(span.stop for span in spans),
        )
        query, key, value = (
            torch.cat([getattr(sequence, name)[span] for (sequence, _), span in zip(work, spans, strict=True)])
            for name in ("query", "key", "value")
        )
        out = self.attention.run(query, key, value, self.cache, batch)
        for (sequence, _), span in zip(work, spans, strict=True):
            sequence.done = span.stop
        return [out[a:b] for a, b in itertools.pairwise(starts)]


@pytest.fixture(params=[TorchPagedAttention, CpuPagedAttention], autouse=True)
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Machine, "kind", request.param, raising=False)


def make(problem: AttentionProblem, length: int, pages: list[int], seed: int = 0) -> Sequence:
    generator = torch.Generator().manual_seed(seed)

    def draw(heads: int) -> Tensor:
        return torch.randn(length, heads, problem.head_dim, generator=generator)

    return Sequence(draw(problem.heads), draw(problem.kv_heads), draw(problem.kv_heads), pages)


def truth(problem: AttentionProblem, sequence: Sequence) -> Tensor:
    """The definition, token by token in float64."""
    group = problem.heads // problem.kv_heads
    query, key, value = sequence.query.double(), sequence.key.double(), sequence.value.double()
    out = torch.full_like(query, torch.nan)
    for token in range(len(query)):
        first = 0 if problem.window is None else max(0, token - problem.window + 1)
        for head in range(problem.heads):
            keys, values = key[first : token + 1, head // group], value[first : token + 1, head // group]
            out[token, head] = torch.softmax(keys @ query[token, head] * problem.scale, 0) @ values
    return out


def error(got: Tensor, wanted: Tensor) -> float:
    """The larger of the relative RMS of all tokens and that of the worst one."""
    rows = (got.double() - wanted).flatten(1).norm(dim=1)
    sizes = wanted.flatten(1).norm(dim=1)
    return float(max(rows.norm() / sizes.norm(), (rows / sizes).max()))


CONSECUTIVE, SCATTERED = [5, 6, 7, 8, 9, 10, 11], [31, 2, 17, 4, 39, 0, 8]
PROBLEMS = [
    AttentionProblem(heads, kv_heads, 8, 0.4, window)
    for heads, kv_heads in ((4, 4), (6, 2), (3, 1))
    for window in (None, 1, 3, 9, 64)
]


@pytest.mark.parametrize("pages", [CONSECUTIVE, SCATTERED], ids=["consecutive", "scattered"])
@pytest.mark.parametrize("chunks", [[26], [1] * 26, [7, 12, 7], [13, 1, 11, 1], [1, 25]], ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.heads}over{p.kv_heads}-window{p.window}")
def test_every_way_of_cutting_a_sequence_into_steps_gives_its_attention(
    problem: AttentionProblem, chunks: list[int], pages: list[int]
) -> None:
    sequence, machine = make(problem, 26, pages), Machine(problem)
    got = torch.cat([machine.step([(sequence, count)])[0] for count in chunks])
    assert error(got, truth(problem, sequence)) < 1e-6


@pytest.mark.parametrize("window", [None, 5])
def test_a_mixed_step_gives_each_sequence_the_bits_it_gets_alone(window: int | None) -> None:
    problem = AttentionProblem(6, 2, 8, 0.3, window)
    pages = [[1, 2, 3, 4], [20, 9, 33, 14], [12, 11, 10], [30, 31, 32]]
    lengths, counts = [13, 16, 9, 10], [1, 6, 9, 1]

    def before(machine: Machine) -> list[Sequence]:
        sequences = [make(problem, n, p, seed) for seed, (n, p) in enumerate(zip(lengths, pages, strict=True))]
        for sequence, length, count in zip(sequences, lengths, counts, strict=True):
            if length > count:
                machine.step([(sequence, length - count)])
        return sequences

    together, alone = Machine(problem), Machine(problem)
    mixed = together.step(list(zip(before(together), counts, strict=True)))
    for sequence, count, got in zip(before(alone), counts, mixed, strict=True):
        assert torch.equal(got, alone.step([(sequence, count)])[0])
        assert error(got, truth(problem, sequence)[-count:]) < 1e-6


def test_the_same_sequence_on_other_pages_gives_the_same_bits() -> None:
    problem = AttentionProblem(6, 2, 8, 0.3)
    results = []
    for pages in (CONSECUTIVE, SCATTERED):
        sequence, machine = make(problem, 25, pages), Machine(problem)
        results.append(torch.cat([machine.step([(sequence, count)])[0] for count in (20, 1, 1, 3)]))
    assert torch.equal(*results)


def test_a_reused_page_shows_nothing_of_its_last_owner() -> None:
    problem = AttentionProblem(4, 2, 8, 0.3)
    machine = Machine(problem)
    first, second = make(problem, 12, [3, 4, 5], seed=1), make(problem, 10, [5, 3, 4], seed=2)
    machine.step([(first, 12)])
    got = torch.cat([machine.step([(second, count)])[0] for count in (5, 1, 4)])
    assert error(got, truth(problem, second)) < 1e-6


def test_a_shared_prefix_page_is_read_and_not_written() -> None:
    problem = AttentionProblem(4, 2, 8, 0.3)
    machine = Machine(problem)
    owner, guest = make(problem, 8, [6, 7], seed=1), make(problem, 14, [6, 7, 20, 1], seed=1)
    for name in ("query", "key", "value"):
        getattr(guest, name)[:8] = getattr(owner, name)
    machine.step([(owner, 8)])
    before = machine.cache.key_PSMH[[6, 7]].clone()
    guest.done = 8
    got = machine.step([(guest, 6)])[0]
    assert error(got, truth(problem, guest)[8:]) < 1e-6
    assert torch.equal(machine.cache.key_PSMH[[6, 7]], before)


def test_a_step_writes_only_its_own_slots() -> None:
    problem = AttentionProblem(4, 2, 8, 0.3)
    sequence, machine = make(problem, 6, [9, 3]), Machine(problem)
    machine.step([(sequence, 6)])
    written = ~machine.cache.key_PSMH.isnan().all(-1).all(-1)
    assert written.nonzero().tolist() == [[3, 0], [3, 1], [9, 0], [9, 1], [9, 2], [9, 3]]
    assert torch.equal(machine.cache.value_PSMH[9], sequence.value[:4])


def test_a_step_without_tokens_returns_none() -> None:
    problem = AttentionProblem(4, 2, 8, 0.3)
    machine = Machine(problem)
    empty = torch.empty(0, dtype=torch.int64)
    batch = AttentionBatch(empty, empty, torch.empty(0, 0, dtype=torch.int32), (0,), ())
    out = machine.attention.run(torch.empty(0, 4, 8), torch.empty(0, 2, 8), torch.empty(0, 2, 8), machine.cache, batch)
    assert out.shape == (0, 4, 8)
