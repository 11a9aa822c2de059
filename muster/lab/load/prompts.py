"""Prompts of a wanted length in tokens, without a tokenizer: words, and how many tokens the server says they are."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

_TEXT = """
about above admit after again agree allow alone along among apply arise avoid basic begin below
bring build carry catch cause chair check clean clear close count cover cross daily dance dream
drink drive early earth eight enjoy enter equal every field fight final first floor focus force
found fresh front glass grand grass great green group happy heart heavy horse hotel house human
"""
WORDS = tuple(_TEXT.split())
"""Of five letters each: a tokenizer of bytes makes the same number of tokens of all, most others one of each."""


@dataclass(frozen=True)
class Gauge:
    """Tokens of a prompt as a straight line over its words.

    Attributes:
        base: tokens of a prompt besides its words, such as a beginning of text.
        per_word: tokens that a word adds.
    """

    base: float
    per_word: float

    @classmethod
    def of(cls, once: int, twice: int) -> Gauge:
        """From the tokens of all the words once over, and twice over."""
        per_word = (twice - once) / len(WORDS)
        return cls(once - per_word * len(WORDS), per_word)

    def words(self, tokens: float) -> int:
        """Words that add so many tokens, at least one."""
        return max(1, round(tokens / self.per_word))


@dataclass(frozen=True)
class Prompts:
    """Texts of a wanted length; no two begin alike behind what they share.

    Attributes:
        gauge: what a word is in tokens.
        shared: tokens that all begin with, on top of their own.
        nonce: of this run. A server that answered the last run has its prompts in its cache, so these are others.
    """

    gauge: Gauge
    shared: int
    nonce: str

    def text(self, name: str, tokens: int) -> str:
        """The prompt of a request.

        Args:
            name: of the request; another one begins otherwise.
            tokens: of the prompt without what all share.
        """
        own = list(_words(f"{self.nonce} own {name}", self.gauge.words(tokens - self.gauge.base)))
        if not self.shared:
            return " ".join(own)
        common = _words(f"{self.nonce} shared", self.gauge.words(self.shared))
        return " ".join([*common, *own])


def probe(times: int, nonce: str) -> str:
    """All the words so many times over."""
    return " ".join(_words(f"{nonce} probe {times}", times * len(WORDS)))


def _words(seed: str, count: int) -> Iterator[str]:
    """Shuffled rounds of all the words: any stretch of a round's length has their mean number of tokens."""
    chance = random.Random(seed)
    for left in range(count, 0, -len(WORDS)):
        yield from chance.sample(WORDS, min(left, len(WORDS)))
