"""Parts of a JSON text as they were written: a number or a string that is parsed and written again may differ."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse)
_SPACE = re.compile(r"[ \t\n\r]*")
_ESCAPED = re.compile(r"\\.", re.DOTALL)


class _Walk:
    """A position in a JSON text; every method raises ValueError where the text is not what it looks for."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0

    def value(self) -> tuple[Any, str]:
        """The value here and how it was written."""
        self._skip()
        value, end = _DECODER.raw_decode(self._text, self._at)
        written, self._at = self._text[self._at : end], end
        return value, written

    def sign(self, allowed: str) -> str:
        """One of the signs allowed here."""
        self._skip()
        found = self._text[self._at : self._at + 1]
        if not found or found not in allowed:
            raise ValueError(f"{found!r} at {self._at}, expected one of {allowed}")
        self._at += 1
        return found

    def follows(self, sign: str) -> bool:
        """Whether `sign` is next; then it is taken."""
        self._skip()
        if not self._text.startswith(sign, self._at):
            return False
        self._at += len(sign)
        return True

    def end(self) -> None:
        """Nothing may follow."""
        self._skip()
        if self._at < len(self._text):
            raise ValueError(f"text after the end at {self._at}")

    def _skip(self) -> None:
        match = _SPACE.match(self._text, self._at)
        assert match is not None
        self._at = match.end()


def value(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON; NaN and Infinity are not.
    """
    walk = _Walk(text)
    try:
        found, _ = walk.value()
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    walk.end()
    return found


def members(text: str) -> Mapping[str, str]:
    """The members of an object, each value as it was written.

    Raises:
        ValueError: the text is not one JSON object, or names a member twice.
    """
    value(text)
    walk, found = _Walk(text), dict[str, str]()
    walk.sign("{")
    if walk.follows("}"):
        return found
    while True:
        name, _ = walk.value()
        walk.sign(":")
        if name in found:
            raise ValueError(f"{name!r} twice")
        found[name] = walk.value()[1]
        if walk.sign(",}") == "}":
            return found


def items(text: str) -> tuple[str, ...]:
    """The items of an array, each as it was written.

    Raises:
        ValueError: the text is not one JSON array.
    """
    value(text)
    walk, found = _Walk(text), list[str]()
    walk.sign("[")
    if walk.follows("]"):
        return ()
    while True:
        found.append(walk.value()[1])
        if walk.sign(",]") == "]":
            return tuple(found)


def inside_string(text: str) -> bool:
    """Whether a JSON text that begins like this is within a string at its end."""
    return _ESCAPED.sub("", text).count('"') % 2 == 1
