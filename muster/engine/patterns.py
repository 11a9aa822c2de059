"""Regular expressions inside a JSON schema that xgrammar 0.2 gets right; any other is refused.

It writes what a pattern matches into the JSON string as it is, so nothing may match that JSON would have to escape. Its
classes leave such characters out by themselves, but not in a pattern with characters beyond ASCII. It lets `(ab+)?`
match `b`, but not `(ab+){0,1}`; counted groups that begin with something repeated it gets wrong here and there; anchors
inside a pattern it drops. Found by matching random texts of random patterns with Python's own expressions. No torch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_TOKEN = re.compile(
    r"(?P<class>\[(?:\\.|[^\]\\])*\])|(?P<code>\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\})|(?P<escape>\\.)"
    r"|(?P<open>\((?:\?:|\?<[A-Za-z]\w*>)?)|(?P<close>\))|(?P<or>\|)"
    r"|(?P<quantifier>(?:[*+?]|\{\d+(?:,\d*)?\})\??)|(?P<anchor>[\^$])|(?P<plain>.)",
    re.DOTALL,
)
_CHARACTER = r"(\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\u\{[0-9a-fA-F]+\}|\\.|.)"
_MEMBER = re.compile(rf"{_CHARACTER}(?:-{_CHARACTER})?", re.DOTALL)
_OPTIONAL_GROUP = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|(?P<group>\)\?\??)", re.DOTALL)
# Before a further digit of sixteen xgrammar reads that as a part of it.
_SHORT_CODE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)
_OPEN_KINDS = ("\\s", "\\S", "\\W", "\\D")
_KINDS = ("\\d", "\\w", *_OPEN_KINDS)


@dataclass
class _Group:
    """What is known of a group so far."""

    empty: bool = True
    repeats: bool = False
    """Whether one of its alternatives begins with something repeated."""


@dataclass
class _Element:
    """The element before a quantifier."""

    first: bool = False
    repeats: bool = False


def rewritten(pattern: str) -> str:
    """The same pattern, its optional groups and its codes as xgrammar gets them right."""
    pattern = _SHORT_CODE.sub(lambda match: rf"\u00{match[1]}" if match[1] else match[0], pattern)
    return _OPTIONAL_GROUP.sub(lambda match: "){0,1}" if match["group"] else match[0], pattern)


def problems(pattern: str) -> Iterator[tuple[str, str]]:
    """What is wrong with a pattern: what was found and what was expected."""
    wide = not pattern.isascii() or re.search(r"\\u(?!00[0-7])|\\x[89a-fA-F]", pattern) is not None
    groups, last = [_Group()], _Element()
    for match in _TOKEN.finditer(pattern):
        kind, text = match.lastgroup, match[0]
        here = f"{text!r} at {match.start()}"
        if kind == "open":
            if pattern.startswith("?", match.end()):
                yield f"{text}? at {match.start()}", "plain groups: (...) or (?:...)"
            groups.append(_Group())
        elif kind == "close" and len(groups) > 1:
            inner = groups.pop()
            last = _begin(groups[-1], inner.repeats)
        elif kind == "or":
            groups[-1].empty = True
        elif kind == "quantifier":
            if last.repeats and text[0] == "{":
                yield here, "a counted group that does not begin with something repeated"
            if last.first:
                groups[-1].repeats = True
            last = _Element()
        elif kind == "anchor":
            if len(groups) > 1 or not _at_an_end(pattern, match):
                yield here, "^ at the beginning and $ at the end only"
        else:
            last = _begin(groups[-1], False)
            if kind == "class" and wide and not _class_is_safe(text):
                yield here, "characters one by one or in ranges, none that JSON escapes, beside characters beyond ASCII"
            elif kind == "escape" and text[1].isalnum() and text not in _KINDS:
                yield here, f"one of {' '.join(_KINDS)}, or a character that prints"
            elif kind != "class" and text not in _KINDS and _needs_escape(_code(text)):
                yield here, "no quote, backslash or control character"
            elif wide and text in (".", *_OPEN_KINDS):
                yield here, "characters themselves, beside characters beyond ASCII"


def _begin(group: _Group, repeats: bool) -> _Element:
    element = _Element(first=group.empty, repeats=repeats)
    group.repeats = group.repeats or (group.empty and repeats)
    group.empty = False
    return element


def _at_an_end(pattern: str, anchor: re.Match[str]) -> bool:
    """Whether an anchor stands where its alternative of the whole pattern begins or ends."""
    beside = pattern[: anchor.start()][-1:] if anchor[0] == "^" else pattern[anchor.end() :][:1]
    return beside in ("", "|")


def _class_is_safe(text: str) -> bool:
    """Whether a class matches nothing that JSON escapes."""
    members = [match.groups() for match in _MEMBER.finditer(text[1:-1])]
    return text[1] != "^" and not any(low in _OPEN_KINDS or _covers(low, high or low) for low, high in members)


def _covers(low: str, high: str) -> bool:
    """Whether a range holds a character that JSON escapes."""
    if low in _KINDS:
        return False
    if low[0] == "\\" and low[1].isalnum() and low[1] not in "xu":
        return True
    return _code(low) < ord(" ") or any(_code(low) <= ord(character) <= _code(high) for character in '"\\')


def _needs_escape(code: int) -> bool:
    return code < ord(" ") or code in (ord('"'), ord("\\"))


def _code(text: str) -> int:
    """The code point of a character or its escape."""
    return int(text[2:].strip("{}"), 16) if re.match(r"\\[xu].", text) else ord(text[-1])
