"""Typed reading of one JSON configuration file: every key asked for is remembered, every problem is kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from muster.errors import ConfigError

T = TypeVar("T")

LARGEST = 2**31 - 1
"""No count in a published model comes near it; a larger one is a typing error, not a model."""

HIGHEST = 1e18
"""The same for numbers that need not be whole."""


def load_object(path: Path) -> dict[str, object]:
    """The JSON object in a file.

    Raises:
        ConfigError: unreadable, not UTF-8, not JSON, a key given twice, or not an object.
    """

    def no_duplicates(pairs: list[tuple[str, object]]) -> dict[str, object]:
        values = dict(pairs)
        if len(values) < len(pairs):
            names = [name for name, _ in pairs]
            twice = sorted({name for name in names if names.count(name) > 1})
            raise ConfigError(f"{path}: key {', '.join(twice)}", found="it twice", expected="every key once")
        return values

    try:
        value = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=no_duplicates)
    except OSError as error:
        raise ConfigError(str(path), found=error.strerror or str(error), expected="a readable file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            str(path), found=f"bytes that are not UTF-8 at offset {error.start}", expected="JSON"
        ) from error
    except json.JSONDecodeError as error:
        found = f"{error.msg} at line {error.lineno}, column {error.colno}"
        hint = "the file may be cut short or a Git-LFS pointer; download it again"
        raise ConfigError(str(path), found=found, expected="valid JSON", hint=hint) from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(path), found=str(error), expected="valid JSON") from error
    if not isinstance(value, dict):
        raise ConfigError(str(path), found=kind(value), expected="a JSON object")
    return value


def kind(value: object) -> str:
    """What a JSON value is, in words for messages."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    return show(value)


def show(value: object, width: int = 80) -> str:
    """A value as JSON, shortened for messages."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError):
        text = repr(value)
    return text if len(text) <= width else text[: width - 4] + " ..."


def plural(count: int, noun: str) -> str:
    """`1 entry`, `3 entries`, `3 keys`."""
    several = f"{noun[:-1]}ies" if noun.endswith("y") and noun[-2:-1] not in tuple("aeou") else f"{noun}s"
    return f"{count} {noun if count == 1 else several}"


Place = tuple[str, ...]
"""Where a value stands: the names from the top of the file down."""


class _WrongError(Exception):
    """A value of the wrong type or out of range; says what was expected."""


@dataclass
class Ledger:
    """What was asked of one file and what was wrong with it; shared by all views of the file."""

    file: str
    family: str = ""
    asked: set[Place] = field(default_factory=set)
    unsound: set[Place] = field(default_factory=set)
    problems: list[ConfigError] = field(default_factory=list)


@dataclass(frozen=True)
class Fields:
    """A view of one JSON object (and of the objects inside it, by dotted keys).

    A key of several names is read under all of them, and the stated values must agree. A leading `/` means the
    top of the file. null counts as absent. Reading never raises: a problem is kept in the ledger and a
    stand-in comes back, so that all problems of a file are found in one pass; `check` stays silent about keys
    that already have a problem.
    """

    root: Mapping[str, object]
    ledger: Ledger
    path: Place = ()

    @classmethod
    def of(cls, values: Mapping[str, object], file: str, family: str = "") -> Fields:
        """A view of a whole file."""
        return cls(values, Ledger(file, family))

    def under(self, *names: str) -> Fields:
        """A view of the object below these names (each taken as it is, dots included)."""
        return Fields(self.root, self.ledger, (*self.path, *names))

    def label(self, key: str = "") -> str:
        """How messages call a key of this object, or the object itself."""
        return ".".join(self._full(key)) if key else ".".join(self.path)

    def whole(self, *keys: str, default: int | None = None, least: int = 1, most: int = LARGEST) -> int:
        """A whole number; required unless there is a default."""
        value = self._read(keys, _whole(least, most))
        return self._or_default(keys, value, default, least, f"a whole number of at least {least}")

    def maybe_whole(self, *keys: str, least: int = 1, most: int = LARGEST) -> int | None:
        """A whole number or None."""
        return self._read(keys, _whole(least, most))

    def number(self, *keys: str, default: float | None = None, above: float = 0.0) -> float:
        """A number greater than `above`; required unless there is a default."""
        value = self._read(keys, _number(above))
        return self._or_default(keys, value, default, above + 1.0, f"a number above {above:g}")

    def maybe_number(self, *keys: str, zero: bool = False) -> float | None:
        """A number above 0 (or 0 itself), or None."""
        return self._read(keys, _number(0.0, zero))

    def flag(self, *keys: str, default: bool | None = None) -> bool:
        """True or false; required unless there is a default."""
        return self._or_default(keys, self._read(keys, _flag), default, False, "true or false")

    def word(self, *keys: str, choices: Collection[str], default: str | None = None) -> str:
        """One of the given strings; required unless there is a default."""
        stand_in = next(iter(choices))
        return self._or_default(keys, self._read(keys, _word(choices)), default, stand_in, _one_of(choices))

    def text(self, *keys: str) -> str | None:
        """Any string, or None."""
        return self._read(keys, _text)

    def names(self, *keys: str) -> tuple[str, ...] | None:
        """A list of strings, or None."""
        return self._read(keys, _names)

    def numbers(self, *keys: str) -> tuple[int, ...] | None:
        """A list of whole numbers of at least 0, or None; a single number counts as a list of one."""
        return self._read(keys, _numbers)

    def entries(self, key: str) -> tuple[str, ...]:
        """The names inside the object below `key`; none when it is absent."""
        value = self._read((key,), _object)
        return tuple(value) if value is not None else ()

    def has_object(self, *names: str) -> bool:
        """Whether an object stands below these names; anything else there but null is a problem."""
        place = (*self.path, *names)
        value = self._find(place)
        if value is not None and not isinstance(value, Mapping):
            self._problem(place, found=kind(value), expected="an object")
        return isinstance(value, Mapping)

    def stated(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self._find(self._full(key)) is not None

    def raw(self, key: str) -> object:
        """The value as it is, known from now on; None where there is none."""
        self.waive(key)
        return self._find(self._full(key))

    def same(self, key: str, *allowed: object) -> None:
        """The key must be absent, null or one of `allowed`, because nothing else is implemented."""
        place = self._full(key)
        self.ledger.asked.add(place)
        value = self._find(place)
        if value is None or any(_equal(value, other) for other in allowed):
            return
        wanted = " or ".join(show(other) for other in allowed) or "nothing"
        reason = f"it changes the computation and nothing else is implemented{self._for_family()}"
        self._problem(place, found=show(value), expected=f"{wanted} ({reason})")

    def waive(self, *keys: str) -> None:
        """Marks keys as known and without effect."""
        self.ledger.asked.update(self._full(key) for key in keys)

    def waive_all(self) -> None:
        """Marks the object and all its keys as known."""
        value = self._find(self.path)
        self.ledger.asked.add(self.path)
        self.waive(*(value if isinstance(value, Mapping) else ()))

    def check(self, good: bool, keys: Sequence[str], thing: str, found: str, expected: str, hint: str = "") -> None:
        """Keeps a contradiction about `thing`, unless one of the keys already has a problem of its own."""
        if good or not self.sound(*keys):
            return
        self.ledger.unsound.add(self._full(thing))
        name = f"{self.ledger.file}: {self.label(thing)}"
        self.ledger.problems.append(ConfigError(name, found=found, expected=expected, hint=hint))

    def sound(self, *keys: str) -> bool:
        """Whether none of the keys has a problem."""
        return not any(self._full(key) in self.ledger.unsound for key in keys)

    def unread(self) -> Iterator[tuple[Place, object]]:
        """Place and value of every key, in any object that was looked into, that nobody asked for."""
        entered = {place[:end] for place in self.ledger.asked for end in range(1, len(place))}

        def walk(values: Mapping[str, object], place: Place) -> Iterator[tuple[Place, object]]:
            for name, value in values.items():
                full = (*place, name)
                if full in entered and isinstance(value, Mapping):
                    yield from walk(value, full)
                elif full not in self.ledger.asked:
                    yield full, value

        yield from walk(self.root, ())

    def unknown(self) -> list[str]:
        """A line for each value that was not asked for."""
        return [
            f"{self.ledger.file}: {'.'.join(place)} = {show(value, 60)} is not known to Muster and has no effect"
            for place, value in self.unread()
            if value is not None
        ]

    def _full(self, key: str) -> Place:
        return tuple(key[1:].split(".")) if key.startswith("/") else (*self.path, *key.split("."))

    def _find(self, place: Place) -> object:
        value: object = self.root
        for name in place:
            if not isinstance(value, Mapping):
                return None
            value = value.get(name)
        return value

    def _read(self, keys: Sequence[str], convert: Callable[[object], T]) -> T | None:
        stated: dict[Place, T] = {}
        for place in dict.fromkeys(self._full(key) for key in keys):
            self.ledger.asked.add(place)
            value = self._find(place)
            if value is None:
                self._check_parent(place)
                continue
            try:
                stated[place] = convert(value)
            except _WrongError as wrong:
                self._problem(place, found=kind(value), expected=str(wrong))
        first = next(iter(stated.items()), None)
        if first is None:
            return None
        other = next(((place, value) for place, value in stated.items() if value != first[1]), None)
        if other is not None:
            found = f"{show(first[1])} there and {show(other[1])} in {'.'.join(other[0])}"
            self._problem(first[0], found=found, expected="one value")
            self.ledger.unsound.add(other[0])
        return first[1]

    def _check_parent(self, place: Place) -> None:
        """A key inside something that is no object is a problem of that thing."""
        parent = place[:-1]
        value = self._find(parent)
        if value is not None and not isinstance(value, Mapping) and parent not in self.ledger.unsound:
            self._problem(parent, found=kind(value), expected="an object")

    def _or_default(self, keys: Sequence[str], value: T | None, default: T | None, stand_in: T, expected: str) -> T:
        if value is not None:
            return value
        if default is not None:
            return default
        if self.sound(*keys):
            first, *others = keys
            known = f" (or {', '.join(key.removeprefix('/') for key in others)})" if others else ""
            self._problem(self._full(first), found="nothing", expected=f"{expected}{self._for_family()}{known}")
        return stand_in

    def _problem(self, place: Place, *, found: str, expected: str) -> None:
        if place in self.ledger.unsound:
            return
        self.ledger.unsound.add(place)
        self.ledger.problems.append(
            ConfigError(f"{self.ledger.file}: {'.'.join(place)}", found=found, expected=expected)
        )

    def _for_family(self) -> str:
        return f" for {self.ledger.family}" if self.ledger.family else ""


def _equal(value: object, other: object) -> bool:
    """Equality of JSON values, where true is not 1."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _one_of(choices: Collection[str]) -> str:
    text = ", ".join(choices)
    return text if len(choices) == 1 else f"one of {text}"


def _whole(least: int, most: int) -> Callable[[object], int]:
    def convert(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            limit = f"of at least {least}" if most == LARGEST else f"from {least} to {most}"
            raise _WrongError(f"a whole number {limit}")
        return value

    return convert


def _number(above: float, itself: bool = False) -> Callable[[object], float]:
    def convert(value: object) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not isinstance(value, int | float) or not is_number or not (above <= value <= HIGHEST):
            raise _WrongError(f"a number above {above:g}")
        if value == above and not itself:
            raise _WrongError(f"a number above {above:g}")
        return float(value)

    return convert


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise _WrongError("true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise _WrongError("a string")
    return value


def _word(choices: Collection[str]) -> Callable[[object], str]:
    def convert(value: object) -> str:
        if not isinstance(value, str) or value not in choices:
            raise _WrongError(_one_of(choices))
        return value

    return convert


def _names(value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _WrongError("a list of strings")
    return tuple(value)


def _numbers(value: object) -> tuple[int, ...]:
    values = value if isinstance(value, list) else [value]
    if any(isinstance(one, bool) or not isinstance(one, int) or not 0 <= one <= LARGEST for one in values):
        raise _WrongError("whole numbers of at least 0")
    return tuple(values)


def _object(value: object) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise _WrongError("an object")
    return value
