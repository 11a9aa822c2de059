"""`muster bench`: how long every proven backend takes beside the floor; what is not proven gets no time."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from muster import env
from muster.errors import INTERRUPTED, UnprovenError
from muster.lab import units
from muster.lab.ledger import records
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import Ledger
from muster.lab.measure import tune as tuned
from muster.lab.measure.race import Place, Race, races, recall, run_races, sample_of
from muster.lab.measure.timing import Sample
from muster.lab.plot import Chart, Track, check_can_save, timing_panels
from muster.lab.prove.cases import Part
from muster.lab.prove.selection import Selection
from muster.lab.prove.standing import Standing, Standings, shortfalls, spans, title
from muster.lab.screen import screen
from muster.lab.table import Column, Section, Table

_COLUMNS = (
    Column("tokens", right=True),
    Column("backend"),
    Column("median", right=True),
    Column("spread", right=True),
    Column("floor", right=True),
    Column("of floor", right=True),
    Column("ratio", right=True),
    Column("note"),
)


def command(
    model: Path,
    *,
    backends: Sequence[str] = (),
    role: str | None = None,
    tokens: str | None = None,
    again: bool = False,
    tune: bool = False,
    plot: Path | None = None,
    json: bool = False,
) -> None:
    """The command: times what is proven and not timed yet, then prints every time beside the floor.

    With `tune` it finds tile sizes for this machine first, proves what runs with them, and saves them.

    Raises:
        InputError: options or a checkpoint that cannot be used.
        UnprovenError: a part that no backend is proven for, or a backend that was asked for and is not; a race that
            ended in a crash.
    """
    if plot is not None:
        check_can_save(plot)
    selection = Selection.of(model, backends=backends, role=role, tokens=tokens)
    if tune:
        tuned.tune(selection)
    outcome = _run(selection, again=again)
    if json:
        sys.stdout.write(jsonlib.dumps(outcome.document(), indent=2) + "\n")
    else:
        outcome.table().write()
    if plot is not None:
        outcome.chart().save(plot)
    outcome.conclude()


def _run(selection: Selection, *, again: bool) -> Outcome:
    home = env.read().home
    interrupted = False
    agenda = selection.agenda(quick=True)
    with Ledger.open(home) as ledger, screen() as view:
        standings = Standings(ledger, selection.device)
        found = tuple(one for each in selection.contenders() for one in standings.of(each, agenda[each.part]))
        entered = [race if again else recall(race, ledger, standings) for race in races(found)]
        outcome = Outcome(selection, found, {(race.part, race.tokens): race for race in entered})
        waiting = [race for race in entered if not race.timings]

        def finished(race: Race) -> None:
            outcome.races[race.part, race.tokens] = race
            done = sum(bool(one.timings) for one in outcome.races.values())
            view.line(f"[{done}/{len(entered)}] {race.part.key}, T={race.tokens}: {race.describe()}")
            view.draw(outcome.table, f"{done} of {len(entered)} timed")

        try:
            run_races(waiting, ledger, standings, selection.directory, home, finished)
        except KeyboardInterrupt:
            interrupted = True
    return replace(outcome, interrupted=interrupted)


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        selection: what was asked.
        standings: how every backend stands.
        races: by part and token count, what was timed.
        interrupted: whether the user stopped it.
    """

    selection: Selection
    standings: tuple[Standing, ...]
    races: dict[tuple[Part, int], Race]
    interrupted: bool = False

    def table(self) -> Table:
        """Per part, times by token count from the fastest on; then what has no time, and why."""
        return Table(_COLUMNS, [Section(title(part), self._rows(part)) for part in self.selection.parts])

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "model": str(self.selection.directory),
            "device": self.selection.device.name,
            "timed": not self._problems(),
            "interrupted": self.interrupted,
            "remark": self.remark,
            "parts": [
                {
                    "part": part.key,
                    "role": part.role.value,
                    "module": part.module,
                    "uses": part.uses,
                    "timings": [
                        {**records.to_json(place.timing), "mark": place.mark, "ratio": place.ratio}
                        for race in self._of(part)
                        for place in race.ranking()
                    ],
                    "refused": [
                        {"backend": one.contender.backend, "tokens": one.tokens, "verdict": one.verdict.value}
                        | {"why": self._why(one)}
                        for one in self._refused(part)
                    ],
                }
                for part in self.selection.parts
            ],
        }

    @property
    def remark(self) -> str:
        """What makes the times worse than they could be; empty: nothing known."""
        return tuned.remark(self.selection.device, self.selection.contenders())

    def chart(self) -> Chart:
        """Time and share of the floor over tokens, a row for each part."""
        rows = [timing_panels(part.key, self._tracks(part), self._floors(part)) for part in self.selection.parts]
        note = "median and quartiles; the floor is bytes over measured bandwidth or operations over measured rate"
        return Chart(f"{self.selection.directory.name} on {self.selection.device.name}", rows, note)

    def conclude(self) -> None:
        """Raises what the exit code says.

        Raises:
            SystemExit: the user interrupted it.
            UnprovenError: what is not proven, or could not be timed.
        """
        if self.remark:
            sys.stderr.write(f"{self.remark}\n")
        if self.interrupted:
            sys.stderr.write("interrupted; the times so far are kept, and the same command goes on from there\n")
            raise SystemExit(INTERRUPTED)
        hint = f"muster verify {self.selection.directory}"
        error = UnprovenError.gather("not timed", self._problems(), hint=hint)
        if error is not None:
            raise error

    def _of(self, part: Part) -> list[Race]:
        return [race for race in self.races.values() if race.part == part]

    def _refused(self, part: Part) -> list[Standing]:
        return [one for one in self.standings if one.contender.part == part and one.verdict is not Verdict.PROVEN]

    def _why(self, standing: Standing) -> str:
        """Why a backend has no time."""
        open_case = standing.verdict is Verdict.NOT_TRIED and standing.asked
        return f"{standing.why}: run muster verify {self.selection.directory}" if open_case else standing.why

    def _rows(self, part: Part) -> list[tuple[str, ...]]:
        times = [_row(place) for race in self._of(part) for place in race.ranking()]
        broken = [_empty_row(str(race.tokens), "", race.describe()) for race in self._of(part) if race.trouble]
        refused = [
            _empty_row(span, same[0].contender.backend, f"{same[0].verdict.value}: {self._why(same[0])}")
            for span, same in spans(self._refused(part))
        ]
        return times + broken + refused

    def _tracks(self, part: Part) -> list[Track]:
        times: dict[str, dict[int, Sample]] = {}
        for race in self._of(part):
            for timing in race.timings:
                times.setdefault(timing.backend, {})[race.tokens] = sample_of(timing)
        failures: dict[str, dict[int, str]] = {}
        for one in self._refused(part):
            if one.verdict.failed:
                failures.setdefault(one.contender.backend, {})[one.tokens] = one.verdict.value
        return [Track(name, times.get(name, {}), failures.get(name, {})) for name in dict.fromkeys((*times, *failures))]

    def _floors(self, part: Part) -> dict[int, float]:
        return {race.tokens: race.timings[0].floor for race in self._of(part) if race.timings}

    def _problems(self) -> tuple[UnprovenError, ...]:
        unproven = shortfalls(self.standings, by_name=self.selection.names is not None)
        broken = (
            UnprovenError(f"{race.part.key} at {race.tokens} tokens", found=race.trouble, expected="times")
            for race in self.races.values()
            if race.trouble
        )
        return (*unproven, *broken)


def _row(place: Place) -> tuple[str, ...]:
    timing = place.timing
    return (
        str(timing.tokens),
        timing.backend,
        units.time(timing.median),
        f"{sample_of(timing).spread:.0%}",
        units.time(timing.floor),
        f"{timing.floor / timing.median:.0%}",
        f"{place.ratio:.2f}",
        place.mark,
    )


def _empty_row(tokens: str, backend: str, note: str) -> tuple[str, ...]:
    return (tokens, backend, "", "", "", "", "", note)
