"""`muster ledger`: the evidence of this machine, what of it counts today, and its way to other machines and back."""

from __future__ import annotations

import json as jsonlib
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch

from muster import env
from muster.device import cpu, cuda
from muster.errors import EnvironmentLackError, UsageError
from muster.lab import units
from muster.lab.ledger import exchange, traces
from muster.lab.ledger.environment import NOTED, current, source_hash
from muster.lab.ledger.evidence import Evidence, Timing, Verdict
from muster.lab.ledger.ledger import Ledger, reasons_against
from muster.lab.ledger.records import to_json
from muster.lab.table import Column, Section, Table

R = TypeVar("R", bound=Evidence | Timing)

FORMATS = ("muster", "flashinfer-bench")


@dataclass(frozen=True)
class Filter:
    """Which records a listing is about; None: any."""

    backend: str | None = None
    part: str | None = None
    role: str | None = None
    verdict: str | None = None

    def check(self) -> None:
        """Raises UsageError for a verdict that is none."""
        if self.verdict is not None and self.verdict not in tuple(Verdict):
            raise UsageError("--verdict", found=repr(self.verdict), expected=f"one of {', '.join(Verdict)}")

    def evidence(self, ledger: Ledger) -> Iterator[Evidence]:
        """The verdicts it lets through."""
        verdict = Verdict(self.verdict) if self.verdict is not None else None
        rows = ledger.evidence(backend=self.backend, role=self.role, verdict=verdict)
        return (row for row in rows if self.part is None or self.part in row.part)

    def timings(self, ledger: Ledger) -> Iterator[Timing]:
        """The times it lets through: none when it asks for a failure."""
        if self.verdict not in (None, Verdict.PROVEN):
            return iter(())
        rows = ledger.timings(backend=self.backend, role=self.role)
        return (row for row in rows if self.part is None or self.part in row.part)


def list_command(wanted: Filter, *, all: bool, json: bool) -> None:
    """Every verdict and time, whether it counts here and now, and if not why; without `all` only the newest of each."""
    wanted.check()
    with _open() as ledger:
        evidence, timings = tuple(wanted.evidence(ledger)), tuple(wanted.timings(ledger))
    # With its verdict as part of the key, a failure is never hidden by a later success on the same case.
    shown = evidence if all else _newest(evidence, lambda row: (row.case, row.verdict))
    times = timings if all else _newest(timings, lambda row: (row.tokens,))
    if json:
        document = {"evidence": [*map(_judged, shown)], "timings": [*map(_judged, times)]}
        sys.stdout.write(jsonlib.dumps(document) + "\n")
        return
    if shown:
        _evidence_table(shown).write()
    if times:
        _timing_table(times).write()
    sys.stderr.write(_summary(shown, times, hidden=len(evidence) - len(shown) + len(timings) - len(times)))


def show_command(id: str, *, json: bool) -> None:
    """Everything that is known of one verdict or time, the command that repeats it included."""
    with _open() as ledger:
        record = ledger.find(id)
        resting = ledger.timings(evidence=record.id)
    document = _judged(record)
    if json:
        sys.stdout.write(jsonlib.dumps({**document, "timings": [to_json(timing) for timing in resting]}) + "\n")
        return
    lines = [*_fields(document)]
    lines += [f"{'time':<18} {units.time(timing.median)} ({timing.id})" for timing in resting]
    sys.stdout.write("".join(f"{_printable(line)}\n" for line in lines))


def export_command(format: str, output: Path | None) -> None:
    """What this machine found itself, as lines of JSON on stdout or in a file that is whole or not there."""
    if format not in FORMATS:
        raise UsageError("--format", found=repr(format), expected=f"one of {', '.join(FORMATS)}")
    with _open() as ledger:
        parcel = exchange.pack(ledger)
    lines = tuple(exchange.lines(parcel) if format == "muster" else _traces(parcel))
    text = "".join(f"{line}\n" for line in lines)
    if output is None:
        sys.stdout.write(text)
        return
    try:
        partial = output.with_name(f".{output.name}.partial")
        partial.write_text(text)
        partial.replace(output)
    except OSError as error:
        raise EnvironmentLackError(str(output), found=str(error), expected="a file to write") from error
    sys.stderr.write(f"{len(lines)} lines in {output}\n")


def import_command(file: Path, name: str | None) -> None:
    """Takes in what another machine found: shown from then on, never counted for a plan."""
    parcel = exchange.unpack(file)
    name = name if name is not None else parcel.name
    with _open() as ledger:
        added = ledger.add_foreign(parcel.records, name)
    known = len(parcel.records) - added
    sys.stderr.write(
        f"{added} records from {name}{f', {known} were here already' if known else ''}; "
        "shown as foreign, never counted for a plan\n"
    )


def _open() -> Ledger:
    return Ledger.open(env.read().home)


@cache
def _now(key: str, role: str, backend: str) -> tuple[Mapping[str, str], str]:
    """The environment and the source hash of a backend here, on the kind of device that `key` names if there is one."""
    device = cuda() if key != "cpu" and torch.cuda.is_available() else cpu()
    return current(device, role, backend), source_hash(role, backend)


def _reasons(record: Evidence | Timing) -> tuple[str, ...]:
    """Why a record does not count here and now."""
    try:
        environment, source = _now(record.environment.get("key", "cpu"), record.role, record.backend)
    except UsageError:
        unchanged = reasons_against(record, record.environment, record.source)
        return (*unchanged, f"no backend {record.backend!r} here")
    return reasons_against(record, environment, source)


def _newest(rows: Iterable[R], key: Callable[[R], tuple[object, ...]]) -> tuple[R, ...]:
    """The last row of each machine, part and backend with the same key."""
    return tuple({(row.origin, row.part, row.backend, *key(row)): row for row in rows}.values())


def _judged(record: Evidence | Timing) -> dict[str, Any]:
    reasons = _reasons(record)
    return {**to_json(record), "counts": not reasons, "reasons": reasons}


def _table(columns: Sequence[Column], rows: Sequence[tuple[Evidence | Timing, Sequence[str]]]) -> Table:
    """A section for each part; the cells of a record between its id with its date, and whether it counts."""
    sections: dict[str, list[Sequence[str]]] = {}
    for record, cells in rows:
        counts = "; ".join(_reasons(record)) or "counts"
        line = (record.id, record.date[:16].replace("T", " "), *cells, counts)
        sections.setdefault(record.part, []).append([_printable(cell) for cell in line])
    return Table(
        (Column("id"), Column("date"), *columns, Column("counts here")),
        tuple(Section(_printable(part), lines) for part, lines in sections.items()),
    )


def _evidence_table(rows: Sequence[Evidence]) -> Table:
    columns = (Column("backend"), Column("tokens", right=True), Column("pattern"), Column("verdict"))
    return _table(columns, [(row, (row.backend, str(row.tokens), row.pattern, str(row.verdict))) for row in rows])


def _timing_table(rows: Sequence[Timing]) -> Table:
    columns = (Column("backend"), Column("tokens", right=True), Column("time", right=True), Column("floor", right=True))
    return _table(columns, [(row, (row.backend, str(row.tokens), units.time(row.median), _share(row))) for row in rows])


def _summary(evidence: Sequence[Evidence], timings: Sequence[Timing], *, hidden: int) -> str:
    if not (evidence or timings):
        return "nothing found: muster verify MODEL adds verdicts, muster bench MODEL times\n"
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in Counter(row.verdict for row in evidence).items())
    records: tuple[Evidence | Timing, ...] = (*evidence, *timings)
    counting = sum(not _reasons(record) for record in records)
    found = f"{len(evidence)} verdicts ({verdicts or 'none'}) and {len(timings)} times, {counting} count here"
    return f"{found}; {hidden} older ones of the same cases are not shown (--all)\n" if hidden else f"{found}\n"


def _traces(parcel: exchange.Parcel) -> Iterator[str]:
    """A line for each trace; on stderr, what the schema has no place for."""
    times = {record.evidence: record for record in parcel.records if isinstance(record, Timing)}
    left_out: Counter[str] = Counter()
    for record in parcel.records:
        if isinstance(record, Evidence):
            found = traces.trace(record, times.get(record.id))
            if found is None:
                left_out[str(record.verdict)] += 1
            else:
                yield jsonlib.dumps(found, allow_nan=False)
    for verdict, count in left_out.items():
        why = "no time rests on them (muster bench)" if verdict == Verdict.PROVEN else "never ran"
        sys.stderr.write(f"left out: {count} {verdict}, {why}\n")


def _fields(document: Mapping[str, Any]) -> Iterator[str]:
    """A line for each field that says something; nested ones are indented under their name."""
    for name, value in document.items():
        if isinstance(value, Mapping):
            yield f"{name}:"
            yield from (f"  {line}" for line in _fields(value))
        elif isinstance(value, tuple):
            yield from (f"{'does not count':<18} {reason}" for reason in value)
        elif value not in (None, ""):
            word = {True: "yes", False: "no"}[value] if isinstance(value, bool) else value
            yield f"{name:<18} {word}{' (noted only)' if name in NOTED else ''}"


def _share(timing: Timing) -> str:
    return f"{timing.floor / timing.median:.0%}" if timing.median > 0 else "-"


def _printable(text: str) -> str:
    """Another machine's text may hold what would steer this terminal."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
