"""How long prompts and answers are: named distributions, one fixed pair, or a file of pairs."""

from __future__ import annotations

import csv
import itertools
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from muster.errors import MusterError, UsageError

_SIGMAS = 3.0
"""A draw further out is drawn again, so that every distribution has a longest prompt."""
_MOST = 1 << 24
_SHOWN = 5
"""Wrong lines of a file that are told; the others are counted."""


@dataclass(frozen=True)
class Pair:
    """Tokens of a prompt and of its answer."""

    prompt: int
    answer: int


class Lengths(Protocol):
    """Pairs without end."""

    def pairs(self, seed: int) -> Iterator[Pair]:
        """The same pairs for the same seed."""
        ...


@dataclass(frozen=True)
class LogNormal:
    """Both lengths log-normal and independent, within three sigmas.

    Attributes:
        prompt, answer: the medians, in tokens.
        prompt_sigma, answer_sigma: standard deviations of the logarithms.
    """

    prompt: float
    prompt_sigma: float
    answer: float
    answer_sigma: float

    def pairs(self, seed: int) -> Iterator[Pair]:
        chance = random.Random(f"lengths {seed}")
        while True:
            prompt = _draw(chance, self.prompt, self.prompt_sigma)
            yield Pair(prompt, _draw(chance, self.answer, self.answer_sigma))


@dataclass(frozen=True)
class Listed:
    """These pairs in this order, again from the start where they end."""

    listed: tuple[Pair, ...]

    def pairs(self, seed: int) -> Iterator[Pair]:
        return itertools.cycle(self.listed)


NAMED: Mapping[str, LogNormal] = MappingProxyType(
    {
        "chat": LogNormal(prompt=180, prompt_sigma=1.0, answer=220, answer_sigma=0.7),
        "summarise": LogNormal(prompt=3000, prompt_sigma=0.5, answer=150, answer_sigma=0.4),
        "code": LogNormal(prompt=1500, prompt_sigma=0.8, answer=120, answer_sigma=0.9),
        "reasoning": LogNormal(prompt=200, prompt_sigma=0.8, answer=3000, answer_sigma=0.7),
    }
)
"""Shapes of work as we imagine it: not fitted to anybody's traffic."""


def parse(text: str) -> Lengths:
    """A named distribution, `fixed:IN,OUT`, or a file.

    Raises:
        UsageError: none of these; every line of a file that is not a pair.
    """
    if text in NAMED:
        return NAMED[text]
    if text.startswith("fixed:"):
        pair = _pair(text.removeprefix("fixed:").split(","))
        if pair is None:
            raise UsageError("--lengths", found=text, expected="fixed:IN,OUT with two token counts of at least 1")
        return Listed((pair,))
    if not Path(text).is_file():
        expected = f"{', '.join(NAMED)}, fixed:IN,OUT, or a file of pairs"
        raise UsageError("--lengths", found=text, expected=expected)
    return Listed(_read(Path(text)))


def _draw(chance: random.Random, median: float, sigma: float) -> int:
    normal = chance.gauss(0.0, 1.0)
    while abs(normal) > _SIGMAS:
        normal = chance.gauss(0.0, 1.0)
    return max(1, round(median * math.exp(sigma * normal)))


def _read(path: Path) -> tuple[Pair, ...]:
    """The pairs of a file: a JSON value per line where it is called .jsonl, else two columns with or without names."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError("--lengths", found=f"{path}: {type(error).__name__}", expected="a text file") from error
    parse_line = _of_json if path.suffix == ".jsonl" else _of_csv
    named = parse_line is _of_csv and bool(lines) and not any(map(str.isdigit, lines[0]))
    found = {number: (line, parse_line(line)) for number, line in enumerate(lines, 1) if line.strip()}
    if named:
        found.pop(1, None)
    wrong = [_wrong(path, number, line) for number, (line, pair) in found.items() if pair is None]
    if len(wrong) > _SHOWN:
        more = UsageError(f"{len(wrong) - _SHOWN} more lines of {path}", expected="the same")
        wrong = [*wrong[:_SHOWN], more]
    problem = UsageError.only_or_all("--lengths", wrong)
    if problem is not None:
        raise problem
    if not found:
        raise UsageError("--lengths", found=f"nothing in {path}", expected="a pair of token counts per line")
    return tuple(pair for _, pair in found.values() if pair is not None)


def _wrong(path: Path, number: int, line: str) -> MusterError:
    expected = "token counts of a prompt and its answer, each at least 1"
    return UsageError(f"--lengths, line {number} of {path}", found=repr(line[:60]), expected=expected)


def _of_csv(line: str) -> Pair | None:
    return _pair(next(csv.reader([line])))


def _of_json(line: str) -> Pair | None:
    """`[IN, OUT]`, or an object with `prompt_tokens` and `answer_tokens`."""
    try:
        value = json.loads(line)
    except ValueError:
        return None
    if isinstance(value, dict):
        value = [value.get("prompt_tokens"), value.get("answer_tokens")]
    return _pair([str(each) for each in value]) if isinstance(value, list) else None


def _pair(words: Sequence[str]) -> Pair | None:
    """Two whole numbers of at least 1, or None."""
    try:
        counts = [int(word) for word in words]
    except ValueError:
        return None
    return Pair(*counts) if len(counts) == 2 and all(1 <= count <= _MOST for count in counts) else None
