"""What this machine's ledger holds of backends on the parts of a model, in a word each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from muster import env
from muster.lab.explain.cells import Cell
from muster.lab.ledger.evidence import Evidence, Verdict
from muster.lab.ledger.ledger import FILE, Ledger
from muster.lab.prove.contender import contenders
from muster.lab.prove.standing import Standings


@dataclass(frozen=True)
class Seen:
    """The last verdict on a backend and a part that counts today; a failure goes before what was proven since.

    Attributes:
        verdict: the verdict.
        evidence: id of the evidence.
        date: when, ISO 8601 in UTC.
        cases: on how many cases there is evidence that counts.
    """

    verdict: Verdict
    evidence: str
    date: str
    cases: int

    def __str__(self) -> str:
        return f"{self.verdict.value}, {self.cases} case{'s' if self.cases != 1 else ''}, {self.date[:10]}"


Verdicts = Mapping[tuple[str, str], Seen]
"""By key of the part and name of the backend."""


def verdicts(cells: Sequence[Cell]) -> Verdicts:
    """What counts for the cells whose device is here; without a ledger nothing, and none is made for this."""
    home = env.read().home
    here = [cell for cell in cells if cell.device.present]
    if not here or not (home / FILE).exists():
        return {}
    with Ledger.open(home) as ledger:
        standings = Standings(ledger, here[0].device)
        found = {
            (cell.part.key, contender.backend): tuple(standings.counting(contender).values())
            for cell in here
            for contender in contenders(cell.part, cell.device)
        }
    return {key: _last(rows) for key, rows in found.items() if rows}


def _last(rows: Sequence[Evidence]) -> Seen:
    last = max(rows, key=lambda row: (row.verdict.failed, row.date))
    return Seen(last.verdict, last.id, last.date, len(rows))
