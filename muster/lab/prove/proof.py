"""Putting backends to the proof: what is not yet known is run in isolation, and every verdict is kept at once."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from muster.lab.ledger.evidence import Evidence
from muster.lab.ledger.ledger import Ledger, new_id
from muster.lab.prove.cases import Case, Part, Role
from muster.lab.prove.contender import Contender
from muster.lab.prove.isolate import Limits
from muster.lab.prove.proving import Finding, prove
from muster.lab.prove.selection import Agenda
from muster.lab.prove.standing import Standings


class Report:
    """Told how the proofs go on; this one keeps quiet."""

    def expect(self, contender: Contender, cases: int) -> None:
        """So many more cases will be run (fewer, if negative)."""

    def found(self, evidence: Evidence) -> None:
        """One case has its verdict, and the ledger has it."""


@dataclass(frozen=True)
class _Job:
    """What one backend is asked in one go: a fresh process costs seconds, and its cases share it."""

    backend: str
    contenders: Mapping[Part, Contender]


def prove_parts(
    contenders: Sequence[Contender],
    agenda: Agenda,
    ledger: Ledger,
    standings: Standings,
    model: Path,
    *,
    again: bool = False,
    limits: Limits | None = None,
    report: Report | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Runs every case that has no evidence that counts and adds what comes of it to the ledger, case by case.

    Another process may do the same at the same time: what it has found by the time a job starts is not run again.

    Args:
        contenders: who is to be proven on what; those that refuse get that as evidence.
        agenda: the cases of each contender's part, by token bucket.
        ledger: where evidence goes.
        standings: what counts.
        model: the checkpoint, for the command that repeats a case.
        again: run all cases, whatever is known.
        limits: of each isolated process.
        report: told of every verdict.
        environment: the environment variables of those processes; None: those of this one.
    """
    clerk = _Clerk(agenda, ledger, standings, model, again, report or Report())
    for contender in contenders:
        if contender.refusal is not None:
            clerk.note_refusal(contender)
    jobs = _jobs(contenders)
    for job in jobs:
        clerk.expect(job)
    for job in jobs:
        cases = clerk.expect(job)
        if cases:
            keep = partial(clerk.keep, job)
            prove(job.backend, cases, limits or Limits(), keep, here=standings.device, environment=environment)


def _jobs(contenders: Iterable[Contender]) -> tuple[_Job, ...]:
    """One for each backend and kind of part."""
    jobs: dict[tuple[bool, str], dict[Part, Contender]] = {}
    for contender in contenders:
        if contender.refusal is None:
            key = (contender.part.role is Role.LINEARS, contender.backend)
            jobs.setdefault(key, {})[contender.part] = contender
    return tuple(_Job(backend, several) for (_, backend), several in jobs.items())


class _Clerk:
    """Knows which cases are still open, and turns findings into evidence."""

    def __init__(
        self, agenda: Agenda, ledger: Ledger, standings: Standings, model: Path, again: bool, report: Report
    ) -> None:
        self._agenda = agenda
        self._ledger = ledger
        self._standings = standings
        self._model = model
        self._again = again
        self._report = report
        self._expected: Counter[Contender] = Counter()

    def expect(self, job: _Job) -> tuple[Case, ...]:
        """The cases of a job that are open now; the report hears of what has changed since it was last asked."""
        cases: list[Case] = []
        for contender in job.contenders.values():
            still_open = self._open(contender)
            self._report.expect(contender, len(still_open) - self._expected[contender])
            self._expected[contender] = len(still_open)
            cases += still_open
        return tuple(cases)

    def keep(self, job: _Job, finding: Finding) -> None:
        """Adds a finding to the ledger."""
        contender, case = job.contenders[finding.case.part], finding.case
        evidence = Evidence(
            id=new_id(),
            verdict=finding.verdict,
            role=contender.part.role.value,
            part=contender.part.key,
            backend=contender.backend,
            case=case.to_json(),
            tokens=case.tokens,
            pattern=case.pattern,
            environment=self._standings.environment(contender),
            source=self._standings.source(contender),
            errors=finding.errors,
            deterministic=finding.deterministic,
            message=finding.message,
            seconds=finding.seconds,
            date=_now(),
            repeat=self._repeat(contender, "--case", case.to_json()),
        )
        self._ledger.add(evidence)
        self._report.found(evidence)

    def note_refusal(self, contender: Contender) -> None:
        """Adds that a backend refuses a part, unless the ledger says so already."""
        assert contender.refusal is not None
        message = "; ".join(contender.reasons)
        known = self._standings.counting(contender).get("")
        if known is not None and (known.verdict, known.message) == (contender.refusal, message):
            return
        self._ledger.add(
            Evidence(
                id=new_id(),
                verdict=contender.refusal,
                role=contender.part.role.value,
                part=contender.part.key,
                backend=contender.backend,
                case="",
                tokens=0,
                pattern="",
                environment=self._standings.environment(contender),
                source=self._standings.source(contender),
                errors=None,
                deterministic=None,
                message=message,
                seconds=0.0,
                date=_now(),
                repeat=self._repeat(contender, "--role", contender.part.role.value),
            )
        )

    def _open(self, contender: Contender) -> tuple[Case, ...]:
        known = {} if self._again else self._standings.counting(contender)
        asked = {
            case.to_json(): case
            for tokens, cases in self._agenda[contender.part].items()
            if contender.meant_for(tokens)
            for case in cases
        }
        return tuple(case for text, case in asked.items() if text not in known)

    def _repeat(self, contender: Contender, *options: str) -> str:
        return shlex.join(("muster", "verify", str(self._model), "--backend", contender.backend, *options))


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")
