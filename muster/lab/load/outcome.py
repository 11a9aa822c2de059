"""What became of one request: its tokens and when they came, or why there are none."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from muster.lab.load.lengths import Pair


class Kind(StrEnum):
    """Ways to fail."""

    HTTP = "http"
    CONNECTION = "connection"
    TIMEOUT = "timeout"
    NO_END = "stream without end"
    ERROR = "error in stream"
    MALFORMED = "malformed answer"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Failure:
    """Why there is no answer.

    Attributes:
        kind: the way it failed.
        message: what the server or the network said, one line.
        status: of HTTP, where the kind is that.
    """

    kind: Kind
    message: str = ""
    status: int | None = None

    def __str__(self) -> str:
        name = f"HTTP {self.status}" if self.kind is Kind.HTTP else self.kind.value
        return f"{name}: {self.message}" if self.message else name

    @property
    def reason(self) -> str:
        """What it has in common with failures that differ in the numbers they tell."""
        return f"{self.kind} {self.status} {re.sub(r'[0-9]+', '#', self.message)}"


class RequestFailedError(Exception):
    """Carries a failure from where it is seen to where it is counted."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(str(failure))
        self.failure = failure


@dataclass(frozen=True)
class Chunk:
    """Tokens that came together.

    Attributes:
        at: when, in seconds of the stage's clock.
        tokens: how many.
    """

    at: float
    tokens: int


@dataclass(frozen=True)
class Answer:
    """A whole answer.

    Attributes:
        prompt_tokens: of the prompt, as the server counted.
        tokens: of the answer, as the server counted.
        chunks: when they came, each with one token at least.
    """

    prompt_tokens: int
    tokens: int
    chunks: tuple[Chunk, ...]

    def gaps(self) -> Iterator[float]:
        """Seconds between tokens; those of one chunk share its wait evenly.

        Those of the first chunk have nothing to be late against: together they are the first token.
        """
        for before, after in itertools.pairwise(self.chunks):
            yield from itertools.repeat((after.at - before.at) / after.tokens, after.tokens)


@dataclass(frozen=True)
class Outcome:
    """A request and what became of it. Times are seconds of the stage's clock, which starts at its first due time.

    Attributes:
        number: of the request in its stage.
        asked: its lengths as asked for, with what all prompts share.
        due: when it should have been sent: what its latency counts from.
        sent: when it was.
        ended: when its answer was whole or had failed.
        answer: all of it; None where it failed.
        failure: why it failed; None where it did not.
    """

    number: int
    asked: Pair
    due: float
    sent: float
    ended: float
    answer: Answer | None = None
    failure: Failure | None = None

    @property
    def result(self) -> str:
        """`completed`, or the way it failed in a word."""
        return self.failure.kind.value if self.failure else "completed"

    @property
    def first_token(self) -> float | None:
        """Seconds from due to the first token."""
        return self.answer.chunks[0].at - self.due if self.answer else None

    @property
    def whole(self) -> float | None:
        """Seconds from due to the end of the answer."""
        return self.ended - self.due if self.answer else None


def spread_tokens(times: Sequence[float], sizes: Sequence[int], tokens: int) -> tuple[Chunk, ...]:
    """Divides an answer's tokens among its chunks, which do not say how many they carry.

    A chunk of no text may be a token that is no letter yet, or nothing: it gets one where there are as many tokens as
    chunks. Else each chunk of text gets one, longest first if they do not suffice, and the rest goes by length.

    Args:
        times: when each chunk came, seconds.
        sizes: bytes of its text.
        tokens: of the answer, as the server counted.
    """
    if tokens == len(times):
        return tuple(Chunk(at, 1) for at in times)
    bytes_in_all = sum(sizes)
    if not bytes_in_all:
        sizes, bytes_in_all = [1] * len(times), len(times)
    bearing = sorted((i for i, size in enumerate(sizes) if size), key=lambda i: -sizes[i])[:tokens]
    counts = [0] * len(times)
    for i in bearing:
        counts[i] = 1
    rest = tokens - len(bearing)
    shares = [rest * size / bytes_in_all for size in sizes]
    whole = [int(share) for share in shares]
    largest = sorted(range(len(times)), key=lambda i: whole[i] - shares[i])
    for i in largest[: rest - sum(whole)]:
        whole[i] += 1
    sums = (one + more for one, more in zip(counts, whole, strict=True))
    return tuple(Chunk(at, count) for at, count in zip(times, sums, strict=True) if count)
