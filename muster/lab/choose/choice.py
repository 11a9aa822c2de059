"""From times to a choice: which proven backends to keep for one part of a model, and which runs for how many tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, groupby

from muster.errors import UnprovenError
from muster.lab.choose.field import Field
from muster.lab.choose.merits import Winner, defeat, merit, remarks
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.standing import Standing, shortfalls
from muster.plan import Choice, PlanEntry


@dataclass(frozen=True)
class Choosing:
    """A choice, and what its reader should know.

    Attributes:
        choice: what runs.
        remarks: what more layouts cost or would have cost, and what they gain.
    """

    choice: Choice
    remarks: tuple[str, ...] = ()


def choose(field: Field, budget: int, requested: str | None = None) -> Choosing:
    """The fastest proven backend of each bucket; of equal ones that of the bucket before, else the simpler.

    Several backends are kept where that is faster, as long as their layouts take no more than `budget` bytes beyond
    the cheapest way to run every bucket.

    Args:
        field: the contenders.
        budget: bytes.
        requested: a backend that runs wherever it is meant to, whatever the times.

    Raises:
        UnprovenError: a bucket without a proven backend, or `requested` is not proven where it is meant to run.
    """
    problems = lacking(field.standings if requested is None else field.of(requested), requested)
    error = UnprovenError.only_or_all(f"{requested} is not proven", problems)
    if error is not None:
        raise error
    ranks = {names: _rank(field, names, requested) for names in _subsets(field) if _covers(field, names, requested)}
    if not ranks:
        unbounded = [standing for standing in field.standings if standing.contender.max_tokens is None]
        raise UnprovenError(
            f"{field.key} at more than {field.buckets[-1]} tokens",
            found="no proven backend",
            expected="one that is meant for any token count",
            reasons=shortfalls(unbounded, by_name=True),
        )
    cheapest = min(ranks, key=lambda names: (field.layout_bytes(names), ranks[names]))
    most = field.layout_bytes(cheapest) + budget
    best = min((names for names in ranks if field.layout_bytes(names) <= most), key=ranks.__getitem__)
    wished = min(ranks, key=ranks.__getitem__)
    winners = _line_up(field, best, requested)
    losers = (defeat(field, name, winners, requested) for name in field.names if name not in {w.name for w in winners})
    choice = Choice(tuple(_entries(field, winners, requested)), tuple(losers))
    line_ups = (_line_up(field, names, requested) for names in (cheapest, best, wished))
    return Choosing(choice, tuple(remarks(field, *line_ups, budget=budget)))


def lacking(standings: Sequence[Standing], requested: str | None) -> tuple[UnprovenError, ...]:
    """Everything that is not proven and should be.

    Args:
        standings: of all contenders for some parts, or of the one that was asked for.
        requested: its name.
    """
    if requested is not None and not any(standing.asked for standing in standings):
        counts = f"{standings[0].tokens} or more"
        return (UnprovenError(f"{requested} at {counts} tokens", found=standings[0].why, expected="proven"),)
    return shortfalls(standings, by_name=requested is not None)


def _subsets(field: Field) -> Iterator[tuple[str, ...]]:
    names = [name for name in field.names if any(name in able for able in field.able.values())]
    for count in range(1, len(names) + 1):
        yield from combinations(names, count)


def _covers(field: Field, names: Sequence[str], requested: str | None) -> bool:
    """Whether these can run every bucket and beyond the last, the one that was asked for among them."""
    buckets = all(set(names) & set(able) for able in field.able.values())
    beyond = set(field.unbounded(names)) & set(field.able[field.buckets[-1]])
    return bool(buckets and beyond) and (requested is None or requested in names)


def _rank(field: Field, names: Sequence[str], requested: str | None) -> tuple[float, int, int, tuple[int, ...]]:
    """The best come first: by slowness, then by layout bytes, how many they are, and who is simpler."""
    slowness = sum(_slowness(field, winner) for winner in _line_up(field, names, requested)[:-1])
    order = tuple(field.names.index(name) for name in names)
    return round(slowness, 6), field.layout_bytes(names), len(names), order


def _slowness(field: Field, winner: Winner) -> float:
    """Log of its time over the fastest's; a tie is no slowness."""
    fastest = field.fastest(winner.bucket, field.names)
    assert fastest is not None, "somebody runs there"
    tied = field.tied(winner.bucket, winner.name, fastest)
    return 0.0 if tied else math.log(field.factor(winner.bucket, winner.name, fastest))


def _line_up(field: Field, names: Sequence[str], requested: str | None) -> tuple[Winner, ...]:
    """Who of these runs each bucket, and beyond the last."""
    winners: list[Winner] = []
    kept = ""
    for bucket in field.buckets:
        kept = _pick(field, bucket, names, kept, requested)
        winners.append(Winner(bucket, bucket, kept))
    last = field.buckets[-1]
    return (*winners, Winner(None, last, _pick(field, last, field.unbounded(names), kept, requested)))


def _pick(field: Field, bucket: int, names: Sequence[str], kept: str, requested: str | None) -> str:
    """Of these backends the one asked for, else the fastest; in a tie the one that is kept, else the simplest."""
    able = [name for name in names if name in field.able[bucket]]
    if requested is not None and requested in able:
        return requested
    fastest = field.fastest(bucket, able)
    assert fastest is not None, "the set covers every bucket"
    equal = [name for name in able if field.tied(bucket, name, fastest)]
    return kept if kept in equal else equal[0]


def _entries(field: Field, winners: Sequence[Winner], requested: str | None) -> Iterator[PlanEntry]:
    """Neighbouring token counts with the same winner are one entry."""
    for name, run in groupby(winners, key=lambda winner: winner.name):
        same = tuple(run)
        buckets = {winner.bucket for winner in same}
        proofs = (row for one in field.of(name) if one.tokens in buckets for row in one.evidence)
        evidence = dict.fromkeys(row.id for row in proofs if row.verdict is Verdict.PROVEN)
        reason, ahead, of_floor = merit(field, same, winners, requested)
        yield PlanEntry(same[-1].max_tokens, name, reason, tuple(evidence), ahead, of_floor)
