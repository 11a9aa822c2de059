"""How far proofs have come: verdicts counted per part and backend, as a live table and as lines."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field

from muster.lab.ledger.evidence import Evidence, Verdict
from muster.lab.prove.contender import Contender
from muster.lab.prove.proof import Report
from muster.lab.prove.standing import share_of_limit
from muster.lab.screen import Screen
from muster.lab.table import Column, Section, Table

_COLUMNS = (Column("backend"), Column("cases", right=True), Column("verdict"), Column("last"))


@dataclass
class _Row:
    expected: int = 0
    verdicts: Counter[Verdict] = field(default_factory=Counter)
    last: str = ""

    def cells(self, backend: str) -> tuple[str, ...]:
        """Its line of the table: the worst verdict so far."""
        worst = next((verdict for verdict in self.verdicts if verdict.failed), None)
        verdict = worst or next(iter(self.verdicts), Verdict.NOT_TRIED)
        return backend, f"{self.verdicts.total()}/{self.expected}", verdict.value, self.last


class Tally(Report):
    """Counts verdicts and shows them as they come.

    Attributes:
        evidence: every verdict, in the order they came.
    """

    def __init__(self, screen: Screen) -> None:
        self.evidence: list[Evidence] = []
        self._screen = screen
        self._rows: dict[tuple[str, str], _Row] = {}
        self._start = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since it began to count."""
        return time.monotonic() - self._start

    @property
    def failures(self) -> int:
        """Verdicts that are failures."""
        return sum(evidence.verdict.failed for evidence in self.evidence)

    @property
    def expected(self) -> int:
        """Cases that are to be run in all."""
        return sum(row.expected for row in self._rows.values())

    def about(self, contender: Contender) -> list[Evidence]:
        """What was found about a backend on a part."""
        return [row for row in self.evidence if (row.part, row.backend) == (contender.part.key, contender.backend)]

    def expect(self, contender: Contender, cases: int) -> None:
        if cases:
            self._row(contender.part.key, contender.backend).expected += cases
            self._draw()

    def found(self, evidence: Evidence) -> None:
        self.evidence.append(evidence)
        row = self._row(evidence.part, evidence.backend)
        row.verdicts[evidence.verdict] += 1
        row.last = f"T={evidence.tokens} {evidence.pattern}: {_outcome(evidence)}"
        where = f"[{len(self.evidence)}/{self.expected}] {evidence.part}, {evidence.backend}, "
        self._screen.line(where + row.last)
        self._draw()

    def _row(self, part: str, backend: str) -> _Row:
        return self._rows.setdefault((part, backend), _Row())

    def _draw(self) -> None:
        status = f"{len(self.evidence)} of {self.expected} cases, {self.failures} failed, {self.seconds:.0f} s"
        self._screen.draw(self._table, status)

    def _table(self) -> Table:
        parts = dict.fromkeys(part for part, _ in self._rows)
        return Table(
            _COLUMNS,
            tuple(
                Section(part, tuple(row.cells(backend) for (of, backend), row in self._rows.items() if of == part))
                for part in parts
            ),
        )


def _outcome(evidence: Evidence) -> str:
    if evidence.verdict is Verdict.PROVEN:
        return f"proven, {share_of_limit(evidence):.0%} of the limit"
    return f"{evidence.verdict.value}, {evidence.message} (evidence {evidence.id})"
