"""`muster plan`, and the plan that `muster run` finds or makes: prove, time, choose, save."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from muster import env
from muster.device import Device, cpu, free_memory
from muster.errors import MusterError, UnprovenError, UsageError
from muster.lab.cases import Part, Role
from muster.lab.choice import Choosing, Field, choose
from muster.lab.ledger import Ledger
from muster.lab.plans import Shelf, document
from muster.lab.proof import prove_parts
from muster.lab.race import SECONDS, Race, races, recall, run_races
from muster.lab.screen import Screen, screen
from muster.lab.selection import Selection
from muster.lab.standing import Standing, Standings, title
from muster.lab.table import Column, Section, Table
from muster.lab.tally import Tally
from muster.plan import Choice, Plan

INTERRUPTED = 130
QUICK_TOKENS = {"cpu": (1, 8, 64, 512)}
"""Token buckets of a proof in seconds, by device; others have the same."""
QUICK_SECONDS = 0.05
BUDGET_SHARE = 0.1
"""Of the free memory: what layouts may keep beyond the cheapest, unless told otherwise."""

_COLUMNS = (Column("tokens", right=True), Column("backend"), Column("evidence", right=True), Column("why"))


def command(model: Path, *, tokens: str | None = None, layout_budget: float | None = None, json: bool = False) -> None:
    """The command: proves and times what is not known yet, chooses, saves, and prints the plan.

    Raises:
        InputError: options or a checkpoint that cannot be used.
        UnprovenError: a part of the checkpoint that no proven backend can run.
    """
    if layout_budget is not None and layout_budget < 0:
        raise UsageError("--layout-budget", found=f"{layout_budget:g}", expected="GiB, at least 0")
    selection = Selection.of(model, tokens=tokens)
    budget = _budget() if layout_budget is None else int(layout_budget * (1 << 30))
    home = env.read().home
    try:
        with Ledger.open(home) as ledger:
            plan = _make(selection, ledger, home, budget=budget)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; what is proven and timed is kept, and the same command goes on from there\n")
        raise SystemExit(INTERRUPTED) from None
    path = Shelf(home, selection.device).save(selection.directory, selection.parts, plan)
    if json:
        drawn = document(selection.directory, selection.device, selection.parts, plan)
        sys.stdout.write(jsonlib.dumps(drawn, indent=2) + "\n")
    else:
        table(selection.parts, plan).write()
        for remark in plan.remarks:
            sys.stdout.write(f"{remark}\n")
    sys.stderr.write(f"saved as {path}; muster run uses it as long as its evidence counts\n")


def obtain(directory: Path, device: Device | None = None, moe_backend: str | None = None) -> Plan:
    """The plan for running a checkpoint: the saved one if all its evidence counts, else one proven now, in seconds.

    Args:
        directory: the checkpoint.
        device: where it will run; None: the processor.
        moe_backend: the backend for the experts; it must be proven like any other.

    Raises:
        InputError: a checkpoint that cannot be read, or an unknown backend.
        UnprovenError: a part that no proven backend can run, or `moe_backend` is not proven.
    """
    home = env.read().home
    selection = Selection.of(directory)
    if moe_backend is not None:
        Selection.of(directory, backends=(moe_backend,), role=Role.EXPERTS)
    shelf = Shelf(home, device or cpu())
    with Ledger.open(home) as ledger:
        plan, reasons = shelf.find(directory, selection.parts, ledger) if moe_backend is None else (None, ())
        if plan is not None:
            return plan
        _say("no plan for this checkpoint yet" if not reasons else f"the saved plan no longer counts: {reasons[0]}")
        _say("proving and timing the backends on its own weights; muster plan does so at length")
        selection = replace(selection, tokens=QUICK_TOKENS["cpu"])
        plan = _make(selection, ledger, home, budget=_budget(), quick=True, requested=moe_backend)
    if moe_backend is None:
        shelf.save(directory, selection.parts, plan)
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
        rows.append((reach, entry.backend, str(len(entry.evidence)), entry.reason))
        first = (entry.max_tokens or 0) + 1
    return rows + [("", loser.backend, "", f"lost: {'; '.join(loser.reasons)}") for loser in choice.losers]


def _make(
    selection: Selection,
    ledger: Ledger,
    home: Path,
    *,
    budget: int,
    quick: bool = False,
    requested: str | None = None,
) -> Plan:
    standings = Standings(ledger, selection.device)
    contenders = selection.contenders()
    agenda = selection.agenda(quick=quick)
    with screen() as view:
        prove_parts(contenders, agenda, ledger, standings, selection.directory, report=Tally(view))
        found = tuple(one for each in contenders for one in standings.of(each, agenda[each.part]))
        finished = _time(found, ledger, standings, selection, home, view, QUICK_SECONDS if quick else SECONDS)
    return _draft(selection, found, finished, budget, requested)


def _time(
    found: Sequence[Standing],
    ledger: Ledger,
    standings: Standings,
    selection: Selection,
    home: Path,
    view: Screen,
    seconds: float,
) -> list[Race]:
    """Every race, those of the ledger as they were."""
    entered = [recall(race, ledger, standings) for race in races(found)]
    finished = [race for race in entered if race.timings]

    def tell(race: Race) -> None:
        finished.append(race)
        view.line(f"[{len(finished)}/{len(entered)}] {race.part.key}, {race.tokens} tokens timed")

    waiting = [race for race in entered if not race.timings]
    run_races(waiting, ledger, standings, selection.directory, home, tell, seconds=seconds)
    return finished


def _draft(
    selection: Selection, found: Sequence[Standing], finished: Sequence[Race], budget: int, requested: str | None
) -> Plan:
    """The plan of every part, or an error with every part that cannot have one."""
    choices: dict[tuple[Role, object], Choice] = {}
    remarks: list[str] = []
    problems: list[MusterError] = []
    for part in selection.parts:
        try:
            chosen = _choose(part, found, finished, budget, requested if part.role is not Role.LINEARS else None)
        except UnprovenError as refusal:
            problems.append(refusal)
            continue
        choices[part.role, part.problem] = chosen.choice
        remarks += [chosen.remark] if chosen.remark else []
    error = UnprovenError.gather(f"no plan for {selection.directory}", problems)
    if error is not None:
        raise error
    return Plan(MappingProxyType(choices), tuple(remarks))


def _choose(
    part: Part, found: Sequence[Standing], finished: Sequence[Race], budget: int, requested: str | None
) -> Choosing:
    times = {(timing.backend, race.tokens): timing for race in finished if race.part == part for timing in race.timings}
    mine = tuple(standing for standing in found if standing.contender.part == part)
    return choose(Field(mine, times, part.uses), budget, requested)


def _budget() -> int:
    return int(BUDGET_SHARE * free_memory())


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
