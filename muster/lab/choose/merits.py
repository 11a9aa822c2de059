"""In words and figures: why a backend runs some token counts, why another does not, and what that costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from muster.lab.choose.field import Field
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.standing import Standing
from muster.lab.units import size, tokens
from muster.plan import Loser, Range, times


@dataclass(frozen=True)
class Winner:
    """Who runs up to `max_tokens` tokens (None: any), as the times of `bucket` say."""

    max_tokens: int | None
    bucket: int
    name: str


def merit(
    field: Field, same: Sequence[Winner], winners: Sequence[Winner], requested: str | None
) -> tuple[str, Range | None, Range | None]:
    """Why a backend runs these neighbouring token counts, how far it is ahead of the next, and its share of the floor.

    Args:
        field: the contenders.
        same: what the one backend runs.
        winners: what all run.
        requested: the backend that was asked for.
    """
    name, buckets = same[0].name, list(dict.fromkeys(winner.bucket for winner in same))
    timed = [field.times[name, bucket] for bucket in buckets if (name, bucket) in field.times]
    of_floor = _range([timing.floor / timing.median for timing in timed])
    if len(same) == 1 and same[0].max_tokens is None:
        # Another one runs the last bucket, which can only be one that is meant for no more than some tokens.
        return _bound(field, winners[-2].name), None, of_floor
    others = [other for other in field.names if other != name]
    rivals = {bucket: rival for bucket in buckets if (rival := field.fastest(bucket, others)) is not None}
    clear = {bucket: rival for bucket, rival in rivals.items() if not field.tied(bucket, name, rival)}
    ahead = _range([field.factor(bucket, rival, name) for bucket, rival in clear.items()])
    if name == requested:
        return "asked for", ahead, of_floor
    if not rivals:
        return _alone(field, others, buckets[0]), None, of_floor
    if ahead is None:
        return "a tie, and the simpler or already kept", None, of_floor
    if ahead[0] < 1.0:
        return "fastest within the layout budget", ahead, of_floor
    return ("fastest" if len(clear) == len(rivals) else "fastest or in a tie"), ahead, of_floor


def defeat(field: Field, name: str, winners: Sequence[Winner], requested: str | None) -> Loser:
    """A backend that runs for no token count, with every reason."""
    standings = field.of(name)
    if standings[0].contender.refusal is not None:
        return Loser(name, standings[0].contender.reasons, refuses=True)
    return Loser(name, (*_slower(field, name, winners, requested), *_faults(standings)))


def remarks(
    field: Field, cheapest: Sequence[Winner], best: Sequence[Winner], wished: Sequence[Winner], *, budget: int
) -> Iterator[str]:
    """What the reader of a choice should know beside it.

    Args:
        field: the contenders.
        cheapest: who would run with the fewest layout bytes.
        best: who runs.
        wished: who would run with any amount of memory.
        budget: bytes of layouts beyond the cheapest.
    """
    less, more, most = (field.layout_bytes({winner.name for winner in each}) for each in (cheapest, best, wished))
    if more > less:
        gain = _gain(field, cheapest, best)
        price = f"{size(more - less)} more of layouts than {_names(cheapest)}"
        yield f"{field.key}: {_names(best)} keep {price}, for {gain}"
    if most - less > budget:
        gain = _gain(field, best, wished)
        yield (
            f"{field.key}: {_names(wished)} would keep {size(most - less)} more of layouts than {_names(cheapest)}, "
            f"for {gain}, but the budget is {size(budget)}"
        )


def _slower(field: Field, name: str, winners: Sequence[Winner], requested: str | None) -> Iterator[str]:
    """Why a backend does not run where it is proven: one line, none if it is proven nowhere."""
    here = [winner for winner in winners[:-1] if name in field.able[winner.bucket]]
    if not here:
        return
    if requested is not None:
        yield f"{requested} was asked for"
        return
    clear = [winner for winner in here if not field.tied(winner.bucket, name, winner.name)]
    factors = {winner.bucket: field.factor(winner.bucket, name, winner.name) for winner in clear}
    gains = {bucket: 1 / factor for bucket, factor in factors.items() if factor < 1}
    if gains:
        counts, most = ", ".join(map(str, gains)), max(gains.values())
        yield f"up to {times((most, most))} as fast at {tokens(counts)}, but over the layout budget"
    elif factors:
        yield f"takes {times((min(factors.values()), max(factors.values())))} the time of {_names(clear)}"
    else:
        yield f"ties with {_names(here)}"


def _faults(standings: Sequence[Standing]) -> Iterator[str]:
    """What is not proven of a backend that does not refuse: a line for each verdict on neighbouring buckets."""
    for verdict, run in groupby(standings, key=lambda standing: standing.verdict):
        same = tuple(run)
        if verdict.failed:
            failures = {row.id for one in same for row in one.evidence if row.verdict.failed}
            more = f" and {len(failures) - 1} more" if len(failures) > 1 else ""
            span = f"{same[0].tokens}-{same[-1].tokens}" if len(same) > 1 else f"{same[0].tokens}"
            yield f"{verdict} at {tokens(span)}: {same[0].why}{more}"
        elif verdict is not Verdict.PROVEN:
            yield from dict.fromkeys(standing.why for standing in same)


def _alone(field: Field, others: Sequence[str], bucket: int) -> str:
    """Why nobody else runs a bucket; those that fail or refuse are told of as losers."""
    small = [name for name in others if bucket > (field.bound(name) or bucket)]
    return " and ".join(_bound(field, name) for name in small) or "the only one proven there"


def _bound(field: Field, name: str) -> str:
    return f"{name} is meant for up to {tokens(field.bound(name) or 0)}"


def _gain(field: Field, before: Sequence[Winner], after: Sequence[Winner]) -> str:
    """How much faster one line-up is than another, where it gains most."""
    pairs = zip(before[:-1], after[:-1], strict=True)
    gain, bucket = max((field.factor(a.bucket, a.name, b.name), a.bucket) for a, b in pairs)
    return f"up to {times((gain, gain))} the speed (at {tokens(bucket)})"


def _names(winners: Sequence[Winner]) -> str:
    return " and ".join(dict.fromkeys(winner.name for winner in winners))


def _range(values: Sequence[float]) -> Range | None:
    return (min(values), max(values)) if values else None
