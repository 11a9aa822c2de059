"""`muster plan`, and the plan that `muster run` finds or makes: prove, time, choose, save."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import torch

from muster import env
from muster.device import free_memory
from muster.errors import MusterError, UnprovenError, UsageError
from muster.lab.choose.choice import Choosing, choose, lacking
from muster.lab.choose.field import Field
from muster.lab.choose.plans import Shelf, document
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import Ledger
from muster.lab.measure.race import SECONDS, Race, races, recall, run_races, sample_of
from muster.lab.measure.tune import remark
from muster.lab.prove.cases import Part, Role
from muster.lab.prove.contender import Contender
from muster.lab.prove.proof import prove_parts
from muster.lab.prove.selection import Agenda, Selection
from muster.lab.prove.standing import Standing, Standings, title
from muster.lab.prove.tally import Tally
from muster.lab.screen import Screen, screen
from muster.lab.table import Column, Section, Table
from muster.moe.problem import MoEProblem
from muster.plan import Choice, Plan, Range

QUICK_TOKENS = (1, 8, 64, 512)
"""Token buckets of a plan in seconds: a decode step of one and of several requests, and two sizes of prefill."""
QUICK_OUTPUT = 1 << 24
"""Elements: a larger output takes longer than the rest together, and only a prefill of a whole vocabulary has one."""
QUICK_SECONDS = 0.05
"""For timing each backend on each case then."""
BUDGET_SHARE = 0.1
"""Of the free memory: what layouts may take beyond the cheapest, unless told otherwise."""

_HINT = "muster run --unproven chooses by declared facts instead and marks every output"
_COLUMNS = (
    Column("tokens", right=True),
    Column("backend"),
    Column("cases", right=True),
    Column("of floor", right=True),
    Column("why"),
)


def command(model: Path, *, tokens: str | None = None, layout_budget: float | None = None, json: bool = False) -> None:
    """The command: proves and times what is not known yet, chooses, saves, and prints the plan.

    Raises:
        InputError: options or a checkpoint that cannot be used.
        UnprovenError: a part of the checkpoint that no proven backend can run.
    """
    problems = []
    if layout_budget is not None and not 0 <= layout_budget < float("inf"):
        problems.append(UsageError("--layout-budget", found=f"{layout_budget:g}", expected="GiB, at least 0"))
    selection = Selection.of(model, tokens=tokens, problems=problems)
    home = env.read().home
    with Ledger.open(home) as ledger:
        budget = None if layout_budget is None else int(layout_budget * (1 << 30))
        plan = _Maker(selection, ledger, Standings(ledger, selection.device), home).plan(budget)
    path = Shelf(home, selection.device).save(selection.directory, selection.parts, plan)
    if json:
        drawn = document(selection.directory, selection.device, selection.parts, plan)
        sys.stdout.write(jsonlib.dumps(drawn, indent=2) + "\n")
    else:
        table(selection.parts, plan).write()
        for remark in plan.remarks:
            sys.stdout.write(f"{remark}\n")
    _say(f"saved as {path}; muster run uses it as long as its evidence counts")


def obtain(directory: Path, moe_backend: str | None = None) -> Plan:
    """The plan for running a checkpoint: the saved one if all its evidence counts, else one proven now, in seconds.

    Args:
        directory: the checkpoint.
        moe_backend: the backend for the experts; it must be proven like any other, and the plan is not saved.

    Raises:
        InputError: a checkpoint that cannot be read, or an unknown backend.
        UnprovenError: a part that no proven backend can run, or `moe_backend` is not proven.
    """
    home = env.read().home
    selection = Selection.of(directory)
    if moe_backend is not None:
        selection.only(moe_backend, Role.EXPERTS)
    shelf = Shelf(home, selection.device)
    with Ledger.open(home) as ledger:
        standings = Standings(ledger, selection.device)
        maker = _Maker(replace(selection, tokens=QUICK_TOKENS), ledger, standings, home, quick=True)
        if moe_backend is not None:
            return maker.plan(requested=moe_backend)
        plan, reasons = shelf.find(selection.directory, selection.parts, ledger)
        if plan is None:
            why = f"the saved plan no longer counts ({reasons[0]})" if reasons else "no plan for this checkpoint yet"
            _say(f"{why}: proving and timing its backends first; muster plan does so at length")
            plan = maker.plan()
            shelf.save(selection.directory, selection.parts, plan)
    return plan


def table(parts: Sequence[Part], plan: Plan) -> Table:
    """What runs each part, then what does not and why."""
    return Table(_COLUMNS, [Section(title(part), _rows(plan.choice(part.role, part.problem))) for part in parts])


def _rows(choice: Choice) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    first = 1
    for entry in choice.entries:
        reach = f"{first}+" if entry.max_tokens is None else f"{first}-{entry.max_tokens}"
        reach = str(first) if entry.max_tokens == first else reach
        rows.append((reach, entry.backend, str(len(entry.evidence)), _percent(entry.of_floor), entry.why))
        first = (entry.max_tokens or 0) + 1
    rows += [("lost", loser.backend, "", "", "; ".join(loser.reasons)) for loser in choice.losers if not loser.refuses]
    refusing = [loser.backend for loser in choice.losers if loser.refuses]
    if refusing:
        others = f"{len(refusing)} other{'s' if len(refusing) > 1 else ''}"
        why = f"cannot run here: {', '.join(refusing)} (muster backends MODEL says why)"
        rows.append(("never", others, "", "", why))
    return rows


def _percent(shares: Range | None) -> str:
    if shares is None:
        return ""
    low, high = (f"{100 * share:.0f}" for share in shares)
    return f"{low}%" if low == high else f"{low}-{high}%"


@dataclass(frozen=True)
class _Maker:
    """Makes a plan from what the ledger knows and what it must still find out.

    Attributes:
        selection: parts, token buckets and backends.
        ledger: where evidence and times come from and go.
        standings: what of it counts.
        home: where the device's measured peaks are kept.
        quick: few cases and short times, and none where a backend has no rival.
    """

    selection: Selection
    ledger: Ledger
    standings: Standings
    home: Path
    quick: bool = False

    def plan(self, budget: int | None = None, requested: str | None = None) -> Plan:
        """The plan.

        Args:
            budget: bytes of layouts beyond the cheapest; None: a share of the free memory.
            requested: a backend for the experts.

        Raises:
            UnprovenError: a part that no proven backend can run, or `requested` is not proven.
        """
        torch.set_num_threads(env.read().threads)
        contenders = self.selection.contenders()
        with _interruptible(), screen() as view:
            if requested is not None:
                self._insist(requested, [one for one in contenders if one.backend == requested], view)
            found = self._prove(contenders, view)
            finished = self._time(found, view)
        if budget is None:
            budget = int(BUDGET_SHARE * free_memory(self.selection.device.torch_device))
        return self._draft(found, finished, budget, requested)

    def _insist(self, requested: str, contenders: Sequence[Contender], view: Screen) -> None:
        """Sees to the backend that was asked for before any other: if it is not proven, the others do not matter."""
        mine = [contender for contender in contenders if contender.part.role is not Role.LINEARS]
        found = self._known(mine)
        if not any(standing.verdict.failed for standing in found):
            found = self._prove(mine, view)
        error = UnprovenError.gather(f"{requested} is not proven", lacking(found, requested), hint=_HINT)
        if error is not None:
            raise error

    def _prove(self, contenders: Sequence[Contender], view: Screen) -> tuple[Standing, ...]:
        """How they stand once every case is settled."""
        tally = Tally(view)
        prove_parts(contenders, self._agenda(), self.ledger, self.standings, self.selection.directory, report=tally)
        return self._known(contenders)

    def _known(self, contenders: Sequence[Contender]) -> tuple[Standing, ...]:
        """How they stand by what the ledger has."""
        agenda = self._agenda()
        known = ((each, self.standings.of(each, agenda[each.part])) for each in contenders)
        return tuple(heeded for each, found in known for heeded in _heed(found, each, self.standings))

    def _agenda(self) -> Agenda:
        agenda = self.selection.agenda(quick=self.quick)
        if not self.quick:
            return agenda
        return {
            part: {tokens: cases for tokens, cases in buckets.items() if tokens * _width(part) <= QUICK_OUTPUT}
            for part, buckets in agenda.items()
        }

    def _time(self, found: Sequence[Standing], view: Screen) -> list[Race]:
        """Every race, those of the ledger as they were.

        Raises:
            UnprovenError: one that could not be timed.
        """
        entered = [race for race in races(found) if len(race.runners) > 1 or not self.quick]
        recalled = [recall(race, self.ledger, self.standings) for race in entered]
        finished = [race for race in recalled if race.timings]

        def tell(race: Race) -> None:
            finished.append(race)
            view.line(f"[{len(finished)}/{len(entered)}] {race.part.key}, T={race.tokens}: {race.describe()}")
            view.draw(lambda: _times(finished), f"{len(finished)} of {len(entered)} timed")

        waiting = [race for race in recalled if not race.timings]
        seconds = QUICK_SECONDS if self.quick else SECONDS
        run_races(waiting, self.ledger, self.standings, self.selection.directory, self.home, tell, seconds=seconds)
        broken = [
            UnprovenError(f"{race.part.key} at {race.tokens} tokens", found=race.trouble, expected="times")
            for race in finished
            if race.trouble
        ]
        error = UnprovenError.gather("not timed", broken, hint=f"muster bench {self.selection.directory}")
        if error is not None:
            raise error
        return finished

    def _draft(self, found: Sequence[Standing], finished: Sequence[Race], budget: int, requested: str | None) -> Plan:
        """The plan of every part, or an error with every part that cannot have one."""
        choices: dict[tuple[Role, object], Choice] = {}
        remarks: list[str] = []
        problems: list[MusterError] = []
        for part in self.selection.parts:
            try:
                chosen = _choose(part, found, finished, budget, requested if part.role is not Role.LINEARS else None)
            except UnprovenError as refusal:
                problems.append(refusal)
            else:
                choices[part.role, part.problem] = chosen.choice
                remarks += chosen.remarks
        error = UnprovenError.gather(f"no plan for {self.selection.directory}", problems, hint=_HINT)
        if error is not None:
            raise error
        return Plan(MappingProxyType(choices), (*remarks, *self._doubts(finished)))

    def _doubts(self, finished: Sequence[Race]) -> Iterator[str]:
        """What makes the times mean less than they seem to."""
        samples = [sample_of(timing) for race in finished for timing in race.timings]
        noisy = [sample.spread for sample in samples if sample.noisy]
        if noisy:
            yield (
                f"{len(noisy)} of {len(samples)} times are noisy (quartiles up to {max(noisy):.0%} apart): something "
                "else used the machine; muster bench --again takes all times anew"
            )
        if untuned := remark(self.selection.device, self.selection.contenders()):
            yield untuned
        if self.quick:
            yield "made in seconds, from few cases and short times; muster plan takes its time"


def _choose(
    part: Part, found: Sequence[Standing], finished: Sequence[Race], budget: int, requested: str | None
) -> Choosing:
    times = {(timing.backend, race.tokens): timing for race in finished if race.part == part for timing in race.timings}
    mine = tuple(standing for standing in found if standing.contender.part == part)
    return choose(Field(mine, times, part.uses), budget, requested)


def _width(part: Part) -> int:
    """Columns of its output."""
    return part.problem.hidden if isinstance(part.problem, MoEProblem) else part.problem.rows


def _heed(found: Sequence[Standing], contender: Contender, standings: Standings) -> Iterator[Standing]:
    """The standings in a plan, where a bucket answers for the token counts below it too, and the last for all above.

    So a failure at any of them is one of the bucket.
    """
    failures = [row for row in standings.counting(contender).values() if row.verdict.failed]
    below = -1
    for standing in found:
        top = float("inf") if standing is found[-1] else standing.tokens
        inside = tuple(row for row in failures if below < row.tokens <= top)
        if inside and standing.verdict is Verdict.PROVEN:
            yield replace(standing, verdict=inside[0].verdict, evidence=(*inside, *standing.evidence))
        else:
            yield standing
        below = standing.tokens


def _times(finished: Sequence[Race]) -> Table:
    parts = dict.fromkeys(race.part for race in finished)
    columns = (Column("tokens", right=True), Column("times"))
    rows = {part: [(str(race.tokens), race.describe()) for race in finished if race.part == part] for part in parts}
    return Table(columns, [Section(part.key, rows[part]) for part in parts])


@contextmanager
def _interruptible() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        _say("interrupted; what is proven and timed is kept, and the same command goes on from there")
        raise


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
