"""Evidence and timings as JSON and back: one form for the ledger's rows, for exports, and for `--json`.

Numbers that are not finite, for which JSON has no word, are the strings "NaN", "Infinity" and "-Infinity".
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from types import MappingProxyType, NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from muster.errors import FormatError
from muster.lab.ledger.evidence import Errors, Evidence, Timing, Verdict

R = TypeVar("R", bound=Evidence | Timing | Errors)

_NOT_FINITE = MappingProxyType({"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf})
_EXPECTED = MappingProxyType(
    {
        str: "text",
        int: "a whole number from 0",
        float: "a number",
        bool: "true or false",
        NoneType: "null",
        Verdict: f"one of {', '.join(Verdict)}",
        Errors: "an object of distances",
        Mapping: "an object of texts",
    }
)


def _field_types(kind: type) -> Mapping[str, tuple[Any, ...]]:
    """Of each field the types it may have: `float | None` is (float, NoneType), a mapping is (Mapping,)."""
    return {
        name: (Mapping,) if get_origin(hint) is Mapping else get_args(hint) or (hint,)
        for name, hint in get_type_hints(kind).items()
    }


_TYPES = MappingProxyType({kind.__name__: _field_types(kind) for kind in (Errors, Evidence, Timing)})


def to_json(record: Evidence | Timing | Errors) -> dict[str, Any]:
    """The record's fields in JSON's own types."""
    return {field.name: plain(getattr(record, field.name)) for field in fields(record)}


def from_json(kind: type[R], data: object) -> R:
    """The record that `to_json` wrote.

    Raises:
        FormatError: not an object, or fields that are unknown, missing or of another type; all of them at once.
    """
    name = kind.__name__.lower()
    if not isinstance(data, dict):
        raise FormatError(name, found=type(data).__name__, expected="a JSON object")
    hints = _TYPES[kind.__name__]
    problems = [FormatError(name, found=f"an unknown field {reprlib.repr(key)}") for key in data if key not in hints]
    problems += [
        FormatError(f"{name}.{field.name}", found="nothing", expected=_words(hints[field.name]))
        for field in fields(kind)
        if field.default is MISSING and field.name not in data
    ]
    values: dict[str, Any] = {}
    for key in hints.keys() & data.keys():
        try:
            values[key] = _read(f"{name}.{key}", hints[key], data[key])
        except FormatError as problem:
            problems.append(problem)
    error = FormatError.gather(f"{name} {reprlib.repr(data['id'])}" if "id" in data else name, problems)
    if error is not None:
        raise error
    return kind(**values)


def plain(value: object) -> Any:
    """A field's value in JSON's own types."""
    if isinstance(value, Errors):
        return to_json(value)
    if isinstance(value, Mapping):
        return {plain(name): plain(text) for name, text in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, str):
        # A message may carry bytes that were no UTF-8; what is written must be.
        return value.encode("utf-8", "backslashreplace").decode()
    return value


def _read(name: str, types: tuple[Any, ...], value: object) -> Any:
    for kind in types:
        if kind is Errors and value is not None:
            return from_json(Errors, value)
        if kind is Verdict and isinstance(value, str) and value in tuple(Verdict):
            return Verdict(value)
        if kind is float and isinstance(value, str) and value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
            return float(value)
        if kind is Mapping and isinstance(value, dict) and all(isinstance(text, str) for text in value.values()):
            return dict(value)
        if kind is int and type(value) is int and 0 <= value < 1 << 63:
            return value
        if kind in (str, bool, NoneType) and type(value) is kind:
            return value
    raise FormatError(name, found=reprlib.repr(value), expected=_words(types))


def _words(types: tuple[Any, ...]) -> str:
    return " or ".join(_EXPECTED[kind] for kind in types)
