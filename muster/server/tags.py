"""Cutting a stream of text at tags, wherever the stream itself is cut, and what all parsers of tagged text share."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from muster.server.events import Event


class Piece(NamedTuple):
    """A stretch of text, or a tag: then `text` is the tag with the line breaks beside it."""

    text: str
    tag: str | None = None


class TagSplitter:
    """Text in, pieces out; joined, their texts are the text.

    Text that may yet become a tag is held, everything else comes out at once.

    Args:
        tags: none of them contains, after its first character, a character that one of them starts with.
        breaks: line breaks on each side of a tag that belong to it at most: chat templates write up to two around
            tags, and they are no part of what the model says.
    """

    def __init__(self, tags: Sequence[str], *, breaks: int = 2) -> None:
        self._tags = tuple(dict.fromkeys(tags))
        self._heads = "".join({tag[0] for tag in self._tags})
        # So only the last such character of a text can begin an unfinished tag, and no two tags overlap.
        assert not any(head in tag[1:] for head in self._heads for tag in self._tags), self._tags
        self._breaks = breaks
        beside = rf"\n{{0,{breaks}}}"
        self._pattern = re.compile(f"{beside}({'|'.join(map(re.escape, self._tags))})({beside})")
        self._held = ""

    def push(self, text: str) -> Iterator[Piece]:
        """Pieces that nothing that follows can change."""
        text, start = self._held + text, 0
        for match in self._pattern.finditer(text):
            if match.end() == len(text) and len(match[2]) < self._breaks:
                keep = match.start()
                break
            yield from _text(text[start : match.start()])
            yield Piece(match[0], match[1])
            start = match.end()
        else:
            keep = self._certain(text, start)
        self._held = text[keep:]
        yield from _text(text[start:keep])

    def close(self) -> Iterator[Piece]:
        """What was held back, when nothing can follow any more."""
        text, self._held = self._held, ""
        match = self._pattern.match(text)
        if match is None:
            yield from _text(text)
        else:
            yield Piece(match[0], match[1])

    def _certain(self, text: str, start: int) -> int:
        """Where in `text` the beginning of a tag may start that is not yet complete, or the end."""
        keep = len(text)
        head = max(text.rfind(character, start) for character in self._heads)
        if head >= 0 and any(tag.startswith(text[head:]) for tag in self._tags):
            keep = head
        least = max(start, keep - self._breaks)
        while keep > least and text[keep - 1] == "\n":
            keep -= 1
        return keep


class TaggedParser(ABC):
    """A `Parser` of what a splitter gives."""

    def __init__(self, splitter: TagSplitter) -> None:
        self._splitter = splitter

    def feed(self, text: str) -> tuple[Event, ...]:
        """Takes the next piece of text; the events that are certain now."""
        return tuple(self._events(self._splitter.push(text)))

    def finish(self) -> tuple[Event, ...]:
        """The answer is over; the events that were held back."""
        return (*self._events(self._splitter.close()), *self._end())

    @abstractmethod
    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        """The events of the next pieces."""

    def _end(self) -> Iterator[Event]:
        """What was held back, now that nothing follows."""
        yield from ()


def _text(text: str) -> Iterator[Piece]:
    if text:
        yield Piece(text)
