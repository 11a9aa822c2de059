"""From times to a choice: which proven backends to keep for one part of a model, and which runs for how many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from muster.errors import UnprovenError
from muster.lab.evidence import Timing, Verdict
from muster.lab.standing import Standing, shortfalls
from muster.lab.timing import Sample, tie
from muster.lab.units import size
from muster.plan import Choice, Loser, PlanEntry


@dataclass(frozen=True)
class Field:
    """The contenders for one part and what is known of them.

    Attributes:
        standings: of every contender in every token bucket, buckets rising.
        times: of proven backends, by name and bucket.
        uses: how many times the model has the part.
    """

    standings: tuple[Standing, ...]
    times: Mapping[tuple[str, int], Timing]
    uses: int

    @property
    def buckets(self) -> tuple[int, ...]:
        """Token counts, rising."""
        return tuple(sorted({standing.tokens for standing in self.standings}))

    @property
    def names(self) -> tuple[str, ...]:
        """Backends that have a time, in the registry's order: earlier ones are the simpler."""
        timed = {name for name, _ in self.times}
        return tuple(dict.fromkeys(s.contender.backend for s in self.standings if s.contender.backend in timed))

    def of(self, name: str) -> list[Standing]:
        """How one backend stands."""
        return [standing for standing in self.standings if standing.contender.backend == name]

    def unbounded(self, name: str) -> bool:
        """Whether a backend is meant for any token count."""
        return self.of(name)[0].contender.max_tokens is None

    def layout_bytes(self, names: Sequence[str]) -> int:
        """What the layouts of these backends keep beside the stored weights, in all of the part's uses."""
        largest = {name: max(t.layout_bytes for (of, _), t in self.times.items() if of == name) for name in names}
        return self.uses * sum(largest.values())


@dataclass(frozen=True)
class _Winner:
    """Who runs up to `max_tokens` tokens (None: any), as the times of `bucket` say."""

    max_tokens: int | None
    bucket: int
    name: str


@dataclass(frozen=True)
class Choosing:
    """A choice, and what its reader should know of its price.

    Attributes:
        choice: what runs.
        remark: what more layouts cost or would have cost, and what they gain; empty when no one asks.
    """

    choice: Choice
    remark: str = ""


def choose(field: Field, budget: int, requested: str | None = None) -> Choosing:
    """The fastest proven backend of each bucket; equal ones give way to the one already kept, then to the simpler.

    Several backends are kept where that is faster, as long as their layouts cost no more than `budget` bytes beyond
    the cheapest way to run every bucket.

    Args:
        field: the contenders.
        budget: bytes.
        requested: a backend that runs wherever it is meant to, whatever the times.

    Raises:
        UnprovenError: a bucket without a proven backend, or `requested` is not proven where it is meant to run.
    """
    _refuse_unproven(field, requested)
    sets = [names for names in _subsets(field.names, requested) if _covers(field, names)]
    if not sets:
        raise UnprovenError(
            field.standings[0].contender.part.key,
            found="no proven backend that is meant for any token count",
            expected="one, for the largest steps",
            reasons=shortfalls(field.standings, by_name=True),
        )
    cheapest = min(field.layout_bytes(names) for names in sets)
    affordable = [names for names in sets if field.layout_bytes(names) - cheapest <= budget]
    best = min(affordable, key=lambda names: _rank(field, names, requested))
    wished = min(sets, key=lambda names: _rank(field, names, requested))
    winners = [_Winner(bucket, bucket, _fastest(field, bucket, best, requested)) for bucket in field.buckets]
    last = field.buckets[-1]
    winners.append(_Winner(None, last, _fastest(field, last, _unbounded(field, best), requested)))
    kept = [winner.name for winner in winners]
    choice = Choice(tuple(_entries(field, winners, requested)), tuple(_losers(field, kept)))
    return Choosing(choice, _remark(field, best, wished, requested))


def _refuse_unproven(field: Field, requested: str | None) -> None:
    asked = field.standings if requested is None else [s for s in field.of(requested) if s.asked]
    problems = shortfalls(asked, by_name=requested is not None)
    if requested is not None and not asked:
        problems = (UnprovenError(requested, found="; ".join(field.of(requested)[0].contender.reasons)),)
    error = UnprovenError.gather("not proven", problems, hint="--unproven runs it all the same and marks every output")
    if error is not None:
        raise error


def _subsets(names: Sequence[str], requested: str | None) -> Iterator[tuple[str, ...]]:
    for count in range(1, len(names) + 1):
        yield from (some for some in combinations(names, count) if requested is None or requested in some)


def _covers(field: Field, names: Sequence[str]) -> bool:
    buckets = all(any((name, bucket) in field.times for name in names) for bucket in field.buckets)
    return buckets and any((name, field.buckets[-1]) in field.times for name in _unbounded(field, names))


def _unbounded(field: Field, names: Sequence[str]) -> tuple[str, ...]:
    return tuple(name for name in names if field.unbounded(name))


def _rank(field: Field, names: Sequence[str], requested: str | None) -> tuple[float, int, int, tuple[int, ...]]:
    """Slowness over all buckets, where a tie is no slowness; then layout bytes, how many, and who is simpler."""
    slowness = sum(_slowness(field, bucket, _fastest(field, bucket, names, requested)) for bucket in field.buckets)
    order = tuple(field.names.index(name) for name in names)
    return round(slowness, 6), field.layout_bytes(names), len(names), order


def _slowness(field: Field, bucket: int, name: str) -> float:
    """Log of a backend's time over the fastest; 0 for a tie."""
    times = {of: time for (of, tokens), time in field.times.items() if tokens == bucket}
    fastest = min(times.values(), key=lambda time: time.median)
    return 0.0 if _tied(times[name], fastest) else math.log(times[name].median / fastest.median)


def _fastest(field: Field, bucket: int, names: Sequence[str], requested: str | None) -> str:
    """Of these backends the one that runs a bucket: the one asked for, else the first that ties with the fastest."""
    able = [name for name in names if (name, bucket) in field.times]
    if requested in able:
        return requested
    fastest = min(able, key=lambda name: field.times[name, bucket].median)
    return next(name for name in able if _tied(field.times[name, bucket], field.times[fastest, bucket]))


def _entries(field: Field, winners: Sequence[_Winner], requested: str | None) -> Iterator[PlanEntry]:
    """Neighbouring token counts with the same winner are one entry."""
    for name, run in groupby(winners, key=lambda winner: winner.name):
        same = list(run)
        buckets = list(dict.fromkeys(winner.bucket for winner in same))
        proofs = [standing for standing in field.of(name) if standing.tokens in buckets]
        evidence = dict.fromkeys(row.id for s in proofs for row in s.evidence if row.verdict is Verdict.PROVEN)
        beyond = len(same) == 1 and same[0].max_tokens is None
        reason = "meant for any token count" if beyond else _reason(field, name, buckets, requested)
        yield PlanEntry(same[-1].max_tokens, name, reason, tuple(evidence))


def _reason(field: Field, name: str, buckets: Sequence[int], requested: str | None) -> str:
    shares = [field.times[name, bucket].floor / field.times[name, bucket].median for bucket in buckets]
    low, high = f"{min(shares):.0%}", f"{max(shares):.0%}"
    floor = f"{low if low == high else f'{low[:-1]}-{high}'} of the floor"
    if name == requested:
        return f"asked for, {floor}"
    rivals = [n for n in field.names if n != name and any((n, bucket) in field.times for bucket in buckets)]
    if not rivals:
        return f"the only one proven there, {floor}"
    factors = [
        min(field.times[n, bucket].median for n in rivals if (n, bucket) in field.times)
        / field.times[name, bucket].median
        for bucket in buckets
        if any((n, bucket) in field.times for n in rivals)
    ]
    if max(factors) < 1.0:
        return f"kept alone within the layout budget, {floor}"
    ahead = _span(factors) if min(factors) > 1.0 else f"up to {max(factors):.1f}x"
    return f"{ahead} as fast as the next, {floor}"


def _losers(field: Field, winners: Sequence[str]) -> Iterator[Loser]:
    for name in dict.fromkeys(standing.contender.backend for standing in field.standings):
        if name not in winners:
            yield Loser(name, _why_not(field, name))


def _why_not(field: Field, name: str) -> tuple[str, ...]:
    whys = dict.fromkeys(standing.why for standing in field.of(name) if standing.why)
    factors = [
        field.times[name, bucket].median / min(t.median for (_, b), t in field.times.items() if b == bucket)
        for bucket in field.buckets
        if (name, bucket) in field.times
    ]
    if not factors:
        return tuple(whys)
    slow = "ties with the winner, which is simpler" if max(factors) <= 1.03 else f"takes {_span(factors)} the time"
    return (slow, *whys)


def _span(factors: Sequence[float]) -> str:
    low, high = f"{min(factors):.1f}", f"{max(factors):.1f}"
    return f"{low}x" if low == high else f"{low}-{high}x"


def _remark(field: Field, best: Sequence[str], wished: Sequence[str], requested: str | None) -> str:
    part = field.standings[0].contender.part.key
    if set(wished) != set(best):
        price = field.layout_bytes(wished) - field.layout_bytes(best)
        gain = _gain(field, best, wished, requested)
        return f"{part}: keeping {' and '.join(wished)} would be {gain} and cost {size(price)}, more than the budget"
    singles = [(name,) for name in best if _covers(field, (name,))]
    if len(best) == 1 or not singles:
        return ""
    alone = min(singles, key=lambda names: _rank(field, names, requested))
    price = field.layout_bytes(best) - field.layout_bytes(alone)
    if price <= 0:
        return ""
    gain = _gain(field, alone, best, requested)
    return f"{part}: {' and '.join(best)} keep {size(price)} more than {alone[0]} alone and are {gain}"


def _gain(field: Field, before: Sequence[str], after: Sequence[str], requested: str | None) -> str:
    """How much faster one set of backends is than another, over the buckets where it is."""
    factors = [
        field.times[_fastest(field, bucket, before, requested), bucket].median
        / field.times[_fastest(field, bucket, after, requested), bucket].median
        for bucket in field.buckets
    ]
    return f"{max(factors):.1f}x as fast at {field.buckets[factors.index(max(factors))]} tokens"


def _tied(a: Timing, b: Timing) -> bool:
    return tie(Sample(a.median, a.low, a.high, a.repetitions), Sample(b.median, b.low, b.high, b.repetitions))
