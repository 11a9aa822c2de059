"""The ledger: all evidence and all times of this machine, in one SQLite file that several processes share.

Rows are only ever added; the file itself refuses to change or to lose one. It keeps a rollback journal rather than a
write-ahead log, so that between two writes the one file is everything: it can be copied to another machine as it is,
and read where it cannot be written.
"""

from __future__ import annotations

import json
import platform
import re
import sqlite3
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self, TypeVar

from muster.errors import EnvironmentLackError, InputError, MusterError, UsageError
from muster.lab.ledger.environment import differences
from muster.lab.ledger.evidence import Evidence, Timing, Verdict
from muster.lab.ledger.records import from_json, to_json

R = TypeVar("R", bound=Evidence | Timing)

FILE = "ledger.sqlite"
VERSION = 1
_APPLICATION = int.from_bytes(b"MSTR")
_WAIT_SECONDS = 60.0
_ID = re.compile("[0-9a-f]{8,64}")
_MOST_NAMED = 10

_SCHEMA = """
CREATE TABLE ledger (name TEXT NOT NULL);
CREATE TABLE evidence (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, role TEXT NOT NULL, part TEXT NOT NULL, backend TEXT NOT NULL,
    tokens INTEGER NOT NULL, origin TEXT NOT NULL, verdict TEXT NOT NULL, record TEXT NOT NULL);
CREATE TABLE timing (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL UNIQUE, role TEXT NOT NULL, part TEXT NOT NULL, backend TEXT NOT NULL,
    tokens INTEGER NOT NULL, origin TEXT NOT NULL, evidence TEXT NOT NULL, record TEXT NOT NULL);
CREATE INDEX evidence_by_part ON evidence (part, backend);
CREATE INDEX timing_by_part ON timing (part, backend);
"""
_KEEP = "CREATE TRIGGER {table}_{event} BEFORE {event} ON {table} BEGIN SELECT RAISE(ABORT, 'a ledger only grows'); END"


def new_id() -> str:
    """A fresh id for a row: 12 hexadecimal digits."""
    return uuid.uuid4().hex[:12]


class Ledger:
    """An open ledger; close it, or use it as a context manager. One per process and thread."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path = path
        self._connection = connection

    @classmethod
    def open(cls, home: Path) -> Ledger:
        """The ledger in `home`, made when it is not there yet.

        Raises:
            InputError: the file is not a ledger, is damaged, or was written by a newer Muster.
            EnvironmentLackError: it cannot be opened or made there.
        """
        path = home / FILE
        with _named_errors(path):
            home.mkdir(parents=True, exist_ok=True)
            ledger = cls(path, sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None))
            with _closed_on_error(ledger):
                # Emptied rather than deleted: a write takes 0.7 ms instead of 13 (ext4, measured), as safely.
                ledger._connection.execute("PRAGMA journal_mode = TRUNCATE")
                if ledger._empty():
                    ledger._create()
                ledger._check()
        return ledger

    @classmethod
    def read(cls, path: Path) -> Ledger:
        """A ledger file from anywhere, only to read from.

        Raises:
            InputError, EnvironmentLackError: as `open`, and when there is no such file.
        """
        with _named_errors(path):
            place = f"{path.absolute().as_uri()}?mode=ro"
            ledger = cls(path, sqlite3.connect(place, uri=True, timeout=_WAIT_SECONDS, isolation_level=None))
            with _closed_on_error(ledger):
                ledger._check()
        return ledger

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the file back; what was added is kept whether or not this is called."""
        self._connection.close()

    @property
    def name(self) -> str:
        """What other machines call this ledger when they import it: the host's name when it was made."""
        with _named_errors(self.path):
            return str(self._connection.execute("SELECT name FROM ledger").fetchone()[0])

    def add(self, evidence: Evidence) -> None:
        """Keeps a verdict; when this returns it is on disk.

        Raises:
            UsageError: another row has its id.
            EnvironmentLackError: the file cannot be written.
        """
        self.add_all((evidence,))

    def add_timing(self, timing: Timing) -> None:
        """Keeps a time, as `add` does."""
        self.add_all((timing,))

    def add_all(self, records: Iterable[Evidence | Timing]) -> None:
        """Keeps all of them or, when one cannot be kept, none."""
        with self._writing():
            for record in records:
                self._insert(record)

    def add_foreign(self, records: Iterable[Evidence | Timing], name: str) -> int:
        """Keeps what another ledger found, marked with its name; what is here already is passed over.

        Returns:
            How many were added.

        Raises:
            UsageError: no name, or ids that are none or that other records have here; nothing is added then.
            EnvironmentLackError: the file cannot be written.
        """
        if not name.strip() or not name.isprintable():
            raise UsageError("the other ledger's name", found=repr(name), expected="a name to mark its evidence with")
        added, problems = 0, []
        with self._writing():
            for record in records:
                known = self._rows(type(record), "id = ?", (record.id,))
                if not _ID.fullmatch(record.id):
                    problems.append(UsageError("id", found=repr(record.id[:60]), expected="hexadecimal digits"))
                elif not known:
                    self._insert(replace(record, origin=name))
                    added += 1
                elif to_json(replace(known[0], origin="")) != to_json(record):
                    problems.append(
                        UsageError(record.id, found="another record with that id here", expected="the same record")
                    )
            error = UsageError.gather(f"nothing was imported from {name}", problems)
            if error is not None:
                raise error
        return added

    def evidence(
        self,
        part: str | None = None,
        backend: str | None = None,
        *,
        role: str | None = None,
        tokens: int | None = None,
        verdict: Verdict | None = None,
        origin: str | None = None,
    ) -> tuple[Evidence, ...]:
        """Verdicts with these fields (None: any), in the order they came; "" as origin is this machine's own."""
        wanted = {"part": part, "backend": backend, "role": role, "tokens": tokens, "origin": origin}
        return self._select(Evidence, {**wanted, "verdict": verdict})

    def timings(
        self,
        part: str | None = None,
        backend: str | None = None,
        *,
        role: str | None = None,
        tokens: int | None = None,
        evidence: str | None = None,
        origin: str | None = None,
    ) -> tuple[Timing, ...]:
        """Times with these fields (None: any), in the order they came; `evidence` is a whole id."""
        wanted = {"part": part, "backend": backend, "role": role, "tokens": tokens, "origin": origin}
        return self._select(Timing, {**wanted, "evidence": evidence})

    def get(self, id: str) -> Evidence:
        """The verdict whose id is, or alone begins with, `id`.

        Raises:
            UsageError: no verdict or several begin so; the several are named.
        """
        return self._only("verdict", id, self._starting(Evidence, id))

    def find(self, id: str) -> Evidence | Timing:
        """The verdict or the time whose id is, or alone among both begins with, `id`; raises as `get`."""
        found: tuple[Evidence | Timing, ...] = (*self._starting(Evidence, id), *self._starting(Timing, id))
        return self._only("verdict or time", id, found)

    def counts(self, record: Evidence | Timing, environment: Mapping[str, str], source: str) -> tuple[str, ...]:
        """Why a record does not count for a backend whose environment and source hash are these; empty: it counts."""
        return reasons_against(record, environment, source)

    def _only(self, thing: str, id: str, found: Sequence[R]) -> R:
        exact = [record for record in found if record.id == id]
        if len(exact or found) != 1:
            raise UsageError(
                f"{thing} {id!r}",
                found=_some([record.id for record in found]) or f"none in {self.path}",
                expected="an id, or a beginning that only one has",
                hint="muster ledger list --all shows the ids",
            )
        return (exact or found)[0]

    def _starting(self, kind: type[R], beginning: str) -> tuple[R, ...]:
        # Up to the next prefix, so that the index on ids is used; ids are ASCII.
        return self._rows(kind, "id >= ? AND id < ?", (beginning, beginning + "\x7f"))

    def _select(self, kind: type[R], wanted: Mapping[str, object]) -> tuple[R, ...]:
        columns = {name: value for name, value in wanted.items() if value is not None}
        return self._rows(kind, " AND ".join(f"{name} = ?" for name in columns) or "1", tuple(columns.values()))

    def _rows(self, kind: type[R], where: str, values: Sequence[object]) -> tuple[R, ...]:
        query = f"SELECT record FROM {kind.__name__.lower()} WHERE {where} ORDER BY row"
        with _named_errors(self.path):
            texts = [text for (text,) in self._connection.execute(query, values).fetchall()]
        try:
            return tuple(from_json(kind, json.loads(text)) for text in texts)
        except (ValueError, MusterError) as error:
            raise _damaged(self.path, str(error)) from error

    def _insert(self, record: Evidence | Timing) -> None:
        data = to_json(record)
        columns = ["id", "role", "part", "backend", "tokens", "origin"]
        columns.append("verdict" if isinstance(record, Evidence) else "evidence")
        table = type(record).__name__.lower()
        marks = ", ".join("?" * (len(columns) + 1))
        values = (*(data[name] for name in columns), json.dumps(data, ensure_ascii=False, allow_nan=False))
        try:
            self._connection.execute(f"INSERT INTO {table} ({', '.join(columns)}, record) VALUES ({marks})", values)
        except sqlite3.IntegrityError as error:
            raise UsageError(f"{table} {record.id}", found="a row with that id", expected="an id of its own") from error

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """One transaction: the lock is taken at once, so that two writers wait for each other and never deadlock."""
        with _named_errors(self.path):
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._connection.execute("COMMIT")
            except BaseException:
                if self._connection.in_transaction:
                    self._connection.execute("ROLLBACK")
                raise

    def _pragma(self, name: str) -> int:
        return int(self._connection.execute(f"PRAGMA {name}").fetchone()[0])

    def _empty(self) -> bool:
        return not self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]

    def _create(self) -> None:
        with self._writing():
            if not self._empty():
                return
            for statement in filter(str.strip, _SCHEMA.split(";")):
                self._connection.execute(statement)
            for table in ("ledger", "evidence", "timing"):
                for event in ("DELETE", "UPDATE"):
                    self._connection.execute(_KEEP.format(table=table, event=event))
            self._connection.execute("INSERT INTO ledger VALUES (?)", (platform.node() or "unnamed",))
            self._connection.execute(f"PRAGMA application_id = {_APPLICATION}")
            self._connection.execute(f"PRAGMA user_version = {VERSION}")

    def _check(self) -> None:
        if self._pragma("application_id") != _APPLICATION:
            raise InputError(
                f"ledger {self.path}",
                found="a SQLite file of another program",
                expected="a Muster ledger",
                hint="name another MUSTER_HOME, or move that file away",
            )
        if (version := self._pragma("user_version")) > VERSION:
            raise InputError(
                f"ledger {self.path}",
                found=f"schema version {version}",
                expected=f"at most {VERSION}",
                hint="a newer Muster wrote it: upgrade this one, or name another MUSTER_HOME",
            )


def reasons_against(record: Evidence | Timing, environment: Mapping[str, str], source: str) -> tuple[str, ...]:
    """Why a record does not count for a backend whose environment and source hash are these; empty: it counts."""
    foreign = (f"foreign: from {record.origin}",) if record.origin else ()
    changed = (f"source {record.source[:12]} then, {source[:12]} now",) if record.source != source else ()
    return (*foreign, *differences(record.environment, environment), *changed)


def _some(ids: Sequence[str]) -> str:
    more = f" and {len(ids) - _MOST_NAMED} more" if len(ids) > _MOST_NAMED else ""
    return ", ".join(ids[:_MOST_NAMED]) + more


@contextmanager
def _closed_on_error(ledger: Ledger) -> Iterator[None]:
    try:
        yield
    except BaseException:
        ledger.close()
        raise


@contextmanager
def _named_errors(path: Path) -> Iterator[None]:
    """SQLite's and the file system's errors under our own names."""
    try:
        yield
    except sqlite3.Error as error:
        raise _translated(path, error) from error
    except OSError as error:
        raise EnvironmentLackError(
            f"ledger {path}", found=str(error), expected="a directory to write in", hint="set MUSTER_HOME to one"
        ) from error


_NEXT_STEPS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "SQLITE_BUSY": ("a turn to write", f"another process held it for {_WAIT_SECONDS:.0f} s: end that one"),
        "SQLITE_FULL": ("free disk space", "make room; all that was added before is kept"),
        "SQLITE_READONLY": ("a file and directory to write in", "set MUSTER_HOME to one"),
        "SQLITE_CANTOPEN": ("a file and directory to write in", "set MUSTER_HOME to one"),
        "SQLITE_": ("a disk that reads and writes", "look at the disk; all that was added before is kept"),
    }
)
"""By the beginning of SQLite's name for an error: what was expected, and what to do."""


def _translated(path: Path, error: sqlite3.Error) -> MusterError:
    code: str = getattr(error, "sqlite_errorname", "")
    if code.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
        return _damaged(path, str(error))
    for beginning, (expected, hint) in _NEXT_STEPS.items():
        if code.startswith(beginning):
            return EnvironmentLackError(f"ledger {path}", found=f"{error} ({code})", expected=expected, hint=hint)
    return _damaged(path, str(error))


def _damaged(path: Path, found: str) -> InputError:
    return InputError(
        f"ledger {path}",
        found=found,
        expected="a whole SQLite file that Muster wrote",
        hint=f"move it away (mv {path} {path}.damaged); the next verify begins a new one",
    )
