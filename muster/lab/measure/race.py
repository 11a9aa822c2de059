"""Timing proven backends against each other: what is not known yet is timed in isolation and kept at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from muster.device import release_memory
from muster.lab import units
from muster.lab.ledger.evidence import Timing, Verdict
from muster.lab.ledger.ledger import Ledger, new_id
from muster.lab.measure.timing import Sample, Timed, order, read, tie
from muster.lab.prove import isolate
from muster.lab.prove.cases import Case, Part, Role
from muster.lab.prove.isolate import Limits
from muster.lab.prove.standing import Standing, Standings

SECONDS = 0.2
"""For each backend on each case unless told otherwise, warm-up not counted."""
LIMITS = Limits(seconds=120.0)
MAX_FAILURES = 3
"""Processes that may fail before the races that are left are not run."""


@dataclass(frozen=True)
class Place:
    """A time, and the shortest of its race."""

    timing: Timing
    fastest: Timing

    @property
    def mark(self) -> str:
        """Whether it is the fastest, or in a tie with it: the word for that, or nothing."""
        if self.timing is self.fastest:
            return "fastest"
        return "tie" if tie(sample_of(self.timing), sample_of(self.fastest)) else ""

    @property
    def ratio(self) -> float:
        """How many times as long as the fastest."""
        return self.timing.median / self.fastest.median


@dataclass(frozen=True)
class Race:
    """The backends that are proven on a part for one token count, and their times.

    Attributes:
        part: what is computed.
        tokens: T.
        runners: how they stand; all of them are proven.
        timings: by the runners' order; empty until all of them have been timed.
        trouble: how the process that timed them failed; empty when it did not.
    """

    part: Part
    tokens: int
    runners: tuple[Standing, ...]
    timings: tuple[Timing, ...] = ()
    trouble: str = ""

    def case(self, directory: Path) -> Case:
        """What they are timed on: tokens routed evenly, on the checkpoint's own weights."""
        pattern = "dense" if self.part.role is Role.LINEARS else "uniform"
        return Case(self.part, self.tokens, pattern, 0, str(directory))

    def ranking(self) -> tuple[Place, ...]:
        """The times, the shortest first."""
        ranked = sorted(self.timings, key=lambda timing: timing.median)
        return tuple(Place(timing, ranked[0]) for timing in ranked)

    def describe(self) -> str:
        """The times in a line, or why there are none."""
        times = (f"{place.timing.backend} {units.time(place.timing.median)}" for place in self.ranking())
        return ", ".join(times) or f"could not be timed: {self.trouble}"


def races(standings: Iterable[Standing]) -> tuple[Race, ...]:
    """One for each part and token count that at least one backend is proven for."""
    proven: dict[tuple[Part, int], list[Standing]] = {}
    for standing in standings:
        if standing.verdict is Verdict.PROVEN:
            proven.setdefault((standing.contender.part, standing.tokens), []).append(standing)
    return tuple(Race(part, tokens, tuple(runners)) for (part, tokens), runners in proven.items())


def recall(race: Race, ledger: Ledger, standings: Standings) -> Race:
    """The race with the times of the last one in the ledger that all its runners ran in and that still counts."""
    known = [_counting(runner, ledger, standings) for runner in race.runners]
    together = set.intersection(*(set(timings) for timings in known))
    return replace(race, timings=tuple(timings[max(together)] for timings in known)) if together else race


def _counting(runner: Standing, ledger: Ledger, standings: Standings) -> dict[str, Timing]:
    """The times that count, by date, which is the same for all that ran in one race."""
    contender = runner.contender
    now, source = standings.environment(contender), standings.source(contender)
    rows = ledger.timings(contender.part.key, contender.backend, tokens=runner.tokens)
    return {row.date: row for row in rows if not ledger.counts(row, now, source)}


def run_races(
    waiting: Sequence[Race],
    ledger: Ledger,
    standings: Standings,
    directory: Path,
    home: Path,
    finished: Callable[[Race], None],
    *,
    seconds: float = SECONDS,
) -> None:
    """Times the runners of each race against each other, all races in one process while none breaks it.

    Args:
        waiting: the races.
        ledger: where times go, race by race.
        standings: the environment they are of.
        directory: the checkpoint.
        home: where the device's measured peaks are kept.
        finished: told of each race, with its times or with how it failed.
        seconds: for each backend on each case, warm-up not counted.
    """
    waiting, failures = list(waiting), 0
    release_memory()
    while waiting:
        names = [[runner.contender.backend for runner in race.runners] for race in waiting]
        cases = [race.case(directory) for race in waiting]
        payload = order(dict(zip(cases, names, strict=True)), standings.device, home, seconds)
        done: list[Race] = []

        def keep(path: Path, _: float, batch: Sequence[Race] = tuple(waiting), done: list[Race] = done) -> None:
            done.append(_keep(batch[len(done)], read(path), ledger, standings))
            finished(done[-1])

        with isolate.run("muster.lab.measure.timing:time_in_child", payload, LIMITS, on_result=keep) as outcome:
            del waiting[: len(done)]
            if not waiting:
                return
            failures += 1
            # Its own fault is known of the first one only; after a few processes the rest are not worth more.
            broken = waiting if failures == MAX_FAILURES else waiting[:1]
            for race in broken:
                finished(replace(race, trouble=outcome.describe()))
            del waiting[: len(broken)]


def _keep(race: Race, timed: Sequence[Timed], ledger: Ledger, standings: Standings) -> Race:
    date = datetime.now(UTC).isoformat(timespec="milliseconds")
    pairs = zip(race.runners, timed, strict=True)
    timings = tuple(_timing(runner, one, standings, date) for runner, one in pairs)
    ledger.add_all(timings)
    return replace(race, timings=timings)


def _timing(runner: Standing, timed: Timed, standings: Standings, date: str) -> Timing:
    contender = runner.contender
    evidence = next(row for row in runner.evidence if row.verdict is Verdict.PROVEN and row.tokens == runner.tokens)
    return Timing(
        id=new_id(),
        evidence=evidence.id,
        role=contender.part.role.value,
        part=contender.part.key,
        backend=contender.backend,
        tokens=runner.tokens,
        environment=standings.environment(contender),
        source=standings.source(contender),
        median=timed.sample.median,
        low=timed.sample.low,
        high=timed.sample.high,
        repetitions=timed.sample.repetitions,
        floor=timed.floor.seconds,
        bytes_read=timed.floor.bytes_read,
        bandwidth=timed.floor.bandwidth,
        layout_bytes=timed.layout_bytes,
        date=date,
    )


def sample_of(timing: Timing) -> Sample:
    """The sample that a timing keeps."""
    return Sample(timing.median, timing.low, timing.high, timing.repetitions)
