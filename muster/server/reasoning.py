"""Reasoning between two tags at the beginning of an answer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from muster.server.events import Content, Event, Reasoning
from muster.server.tags import Piece, TaggedParser, TagSplitter


class ReasoningParser(TaggedParser):
    """Reasoning up to the closing tag, content after it. See `Parser`.

    Only an opening tag at the very beginning counts, so that an answer may speak of the tags. Without a closing tag
    all is reasoning; without an opening one all is content.

    Args:
        opening, closing: the tags.
        inside: the prompt ended with the opening tag.
    """

    def __init__(self, opening: str, closing: str, *, inside: bool = False) -> None:
        super().__init__(TagSplitter((opening, closing)))
        self._opening, self._closing = opening, closing
        self._inside = inside
        self._fresh = True
        if inside:
            # As if the answer had said it, so that line breaks after it are still the tag's.
            self.feed(opening)

    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if self._fresh and piece.tag == self._opening:
                self._inside = True
            elif self._inside and piece.tag == self._closing:
                self._inside = self._fresh = False
            else:
                self._fresh = False
                yield Reasoning(piece.text) if self._inside else Content(piece.text)
