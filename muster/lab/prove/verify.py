"""`muster verify`: how every backend stands on every part of a checkpoint, proven here and kept in the ledger."""

from __future__ import annotations

import itertools
import json as jsonlib
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from muster import env
from muster.errors import INTERRUPTED, UnprovenError, UsageError
from muster.lab.ledger import records
from muster.lab.ledger.ledger import Ledger
from muster.lab.prove.cases import Case, Part
from muster.lab.prove.proof import prove_parts
from muster.lab.prove.selection import Agenda, Selection
from muster.lab.prove.standing import Standing, Standings, closest, shortfalls, spans, stand, title
from muster.lab.prove.tally import Tally
from muster.lab.screen import screen
from muster.lab.table import Column, Section, Table

_COLUMNS = (
    Column("backend"),
    Column("tokens"),
    Column("verdict"),
    Column("cases", right=True),
    Column("worst error", right=True),
    Column("limit", right=True),
    Column("note"),
)


def command(
    model: Path,
    *,
    backends: Sequence[str] = (),
    role: str | None = None,
    tokens: str | None = None,
    soak: float | None = None,
    seed: int = 0,
    case: str | None = None,
    again: bool = False,
    json: bool = False,
) -> None:
    """The command: proves what is not known yet, then prints how every backend stands.

    Raises:
        InputError: options or a checkpoint that cannot be used.
        UnprovenError: a part that no backend is proven for, or a backend that was asked for and is not.
    """
    problems = _problems(soak, case, role, tokens)
    selection = Selection.of(model, backends=backends, role=role, tokens=tokens, problems=problems)
    if case is not None:
        only = _case(case)
        selection = replace(selection, parts=(only.part,), tokens=(only.tokens,))
        outcome = _run(selection, iter(({only.part: {only.tokens: (only,)}},)), again=True, alone=True)
    else:
        seconds = None if soak is None else 60.0 * soak
        outcome = _run(selection, _rounds(selection, seed, seconds), again=again)
    if json:
        sys.stdout.write(jsonlib.dumps(outcome.document(), indent=2) + "\n")
    else:
        outcome.table().write()
    outcome.conclude()


def _problems(soak: float | None, case: str | None, role: str | None, tokens: str | None) -> Iterator[UsageError]:
    if soak is not None and not 0 < soak < float("inf"):
        yield UsageError("--soak", found=f"{soak:g}", expected="minutes, more than 0")
    if case is not None:
        beside = {"--soak": soak, "--role": role, "--tokens": tokens}
        given = (name for name, value in beside.items() if value is not None)
        yield from (UsageError(name, found="--case beside it", expected="one of the two") for name in given)


def _case(text: str) -> Case:
    try:
        return Case.from_json(text)
    except UsageError as error:
        hint = "muster ledger show ID prints the command that repeats a verdict"
        raise UsageError("--case", found=error.found, expected=error.expected, hint=hint) from error


def _rounds(selection: Selection, seed: int, soak: float | None) -> Iterator[Agenda]:
    """The cases of `seed`; in a soak, those of seeds that nobody tried before, until the time is up."""
    end = time.monotonic() + (soak or 0.0)
    yield selection.agenda(seed=seed)
    fresh = itertools.count(secrets.randbelow(1 << 31))
    while time.monotonic() < end:
        yield selection.agenda(seed=next(fresh))


def _run(selection: Selection, rounds: Iterator[Agenda], *, again: bool, alone: bool = False) -> Outcome:
    """Proves round after round, until all are done or the user interrupts.

    Args:
        selection: parts and backends.
        rounds: the cases; the standings are about those of the first round.
        again: run cases whose evidence counts too.
        alone: judge by what was found now, whatever the ledger says.
    """
    switches = env.read()
    torch.set_num_threads(switches.threads)
    contenders = selection.contenders()
    interrupted, seeds = False, 0
    with Ledger.open(switches.home) as ledger:
        standings = Standings(ledger, selection.device)
        first = next(rounds)
        with screen() as view:
            tally = Tally(view)
            try:
                for agenda in itertools.chain((first,), rounds):
                    prove_parts(
                        contenders,
                        agenda,
                        ledger,
                        standings,
                        selection.directory,
                        again=again or seeds > 0,
                        report=tally,
                    )
                    seeds += 1
            except KeyboardInterrupt:
                interrupted = True
        found = [
            standing
            for each in contenders
            for standing in (
                stand(each, first[each.part], tally.about(each)) if alone else standings.of(each, first[each.part])
            )
        ]
    return Outcome(selection, tuple(found), len(tally.evidence), tally.failures, tally.seconds, seeds, interrupted)


@dataclass(frozen=True)
class Outcome:
    """What came of it.

    Attributes:
        selection: what was asked.
        standings: how every backend stands now, by part, backend, tokens.
        cases, failures: how many were run, and how many of those failed.
        seconds: how long that took.
        rounds: how many seeds were gone through to the end.
        interrupted: whether the user stopped it.
    """

    selection: Selection
    standings: tuple[Standing, ...]
    cases: int
    failures: int
    seconds: float
    rounds: int
    interrupted: bool

    def table(self) -> Table:
        """Neighbouring token buckets with the same answer share a row."""
        return Table(
            _COLUMNS,
            [
                Section(title(part), [_row(span, same) for span, same in spans(self._of(part))])
                for part in self.selection.parts
            ],
        )

    def document(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "model": str(self.selection.directory),
            "device": self.selection.device.name,
            "proven": not shortfalls(self.standings, by_name=self.selection.names is not None),
            "interrupted": self.interrupted,
            "cases": self.cases,
            "failures": self.failures,
            "seconds": self.seconds,
            "rounds": self.rounds,
            "parts": [
                {
                    "part": part.key,
                    "role": part.role.value,
                    "module": part.module,
                    "uses": part.uses,
                    "standings": [_record(standing) for standing in self._of(part)],
                }
                for part in self.selection.parts
            ],
        }

    def conclude(self) -> None:
        """Says what was done and how to go on.

        Raises:
            SystemExit: the user interrupted it.
            UnprovenError: what is not proven.
        """
        _say(self._summary())
        if self.interrupted:
            _say("interrupted; what is finished is kept, and the same command goes on from there")
            raise SystemExit(INTERRUPTED)
        problems = shortfalls(self.standings, by_name=self.selection.names is not None)
        error = UnprovenError.gather("not proven", problems)
        if error is not None:
            raise error

    def _summary(self) -> str:
        if not self.cases:
            return "nothing to run: every case has evidence that counts (--again runs them again)"
        seeds = f", {self.rounds} seeds" if self.rounds > 1 else ""
        return f"{self.cases} cases{seeds}, {self.failures} failed, in {_duration(self.seconds)}"

    def _of(self, part: Part) -> list[Standing]:
        return [standing for standing in self.standings if standing.contender.part == part]


def _row(span: str, same: Sequence[Standing]) -> tuple[str, ...]:
    # The case without tokens is evidence for every bucket.
    rows = list({row.id: row for standing in same for row in standing.evidence}.values())
    pair = max(filter(None, map(closest, rows)), key=lambda pair: pair[0] / pair[1], default=None)
    figures = ("", "") if pair is None else (f"{pair[0]:.1e}", f"{pair[1]:.1e}")
    return same[0].contender.backend, span, same[0].verdict.value, str(len(rows) or ""), *figures, same[0].why


def _record(standing: Standing) -> dict[str, Any]:
    worst = standing.evidence[0] if standing.evidence else None
    return {
        "backend": standing.contender.backend,
        "tokens": standing.tokens,
        "verdict": standing.verdict.value,
        "why": standing.why,
        "worst": records.to_json(worst) if worst else None,
        "evidence": [row.id for row in standing.evidence],
    }


def _duration(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 60 else f"{int(seconds // 60)} min {seconds % 60:.0f} s"


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
