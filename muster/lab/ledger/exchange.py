"""Evidence that travels: what one ledger found itself, as lines of JSON or as its whole file.

The first line of JSON names the form and the ledger; each one after it is `{"evidence": {...}}` or `{"timing": {...}}`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from muster.errors import FormatError, InputError
from muster.lab.ledger.evidence import Evidence, Timing
from muster.lab.ledger.ledger import Ledger
from muster.lab.ledger.records import from_json, to_json

_FORM, _VERSION = "muster-ledger", 1
_SQLITE = b"SQLite format 3\0"
_KINDS: Mapping[str, type[Evidence | Timing]] = MappingProxyType({"evidence": Evidence, "timing": Timing})
_MOST_SHOWN = 20


@dataclass(frozen=True)
class Parcel:
    """What another ledger found itself, not what it had imported.

    Attributes:
        name: the other ledger's.
        records: its verdicts, then its times.
    """

    name: str
    records: tuple[Evidence | Timing, ...]


def pack(ledger: Ledger) -> Parcel:
    """What `ledger` found itself."""
    return Parcel(ledger.name, (*ledger.evidence(origin=""), *ledger.timings(origin="")))


def lines(parcel: Parcel) -> Iterator[str]:
    """The parcel as lines of JSON."""
    yield json.dumps({"form": _FORM, "version": _VERSION, "name": parcel.name})
    for record in parcel.records:
        yield json.dumps({type(record).__name__.lower(): to_json(record)}, allow_nan=False)


def unpack(path: Path) -> Parcel:
    """What another ledger's file, or an export of it, holds.

    Raises:
        InputError: neither of the two, or lines that cannot be read; all of them with their numbers.
        EnvironmentLackError: the file cannot be opened.
    """
    if not path.is_file():
        raise InputError(str(path), found="no such file", expected="a ledger, or what `muster ledger export` wrote")
    with path.open("rb") as file:
        is_ledger = file.read(len(_SQLITE)) == _SQLITE
    if is_ledger:
        with Ledger.read(path) as other:
            return pack(other)
    first, *rest = path.read_bytes().splitlines() or [b""]
    name = _name(path, first)
    records: list[Evidence | Timing] = []
    problems: list[FormatError] = []
    for number, line in enumerate(rest, start=2):
        try:
            records.append(_record(line))
        except FormatError as problem:
            problems.append(_at_line(number, problem))
    if len(problems) > _MOST_SHOWN:
        problems[_MOST_SHOWN:] = [FormatError("further lines", found=f"{len(problems) - _MOST_SHOWN} that are wrong")]
    error = FormatError.gather(str(path), problems, hint="nothing was imported")
    if error is not None:
        raise error
    return Parcel(name, tuple(records))


def _at_line(number: int, problem: FormatError) -> FormatError:
    return FormatError(
        f"line {number}: {problem.thing}", found=problem.found, expected=problem.expected, reasons=problem.reasons
    )


def _name(path: Path, line: bytes) -> str:
    head = _object(line)
    if head is None or head.get("form") != _FORM:
        raise FormatError(
            f"{path}, line 1",
            found=repr(line[:60]),
            expected=f'a ledger, or {{"form": "{_FORM}", ...}} as `muster ledger export --format muster` writes it',
        )
    if head.get("version") != _VERSION or not isinstance(head.get("name"), str) or not head["name"]:
        raise FormatError(
            f"{path}, line 1",
            found=f"version {head.get('version')!r}, name {head.get('name')!r}",
            expected=f"version {_VERSION} and a name",
            hint="a newer Muster may have written it: upgrade this one",
        )
    return str(head["name"])


def _record(line: bytes) -> Evidence | Timing:
    data = _object(line)
    if data is None or len(data) != 1 or not _KINDS.keys() & data.keys():
        raise FormatError("line", found=repr(line[:60]), expected='{"evidence": {...}} or {"timing": {...}}')
    ((kind, fields),) = data.items()
    record = from_json(_KINDS[kind], fields)
    if record.origin:
        raise FormatError(f"{kind}.origin", found=repr(record.origin), expected="only what that ledger found itself")
    return record


def _object(line: bytes) -> dict[str, object] | None:
    try:
        data = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
