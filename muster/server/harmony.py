"""Harmony, the format of gpt-oss: an answer is messages, and the header of each says what it is.

`<|start|>assistant<|channel|>analysis<|message|>...<|end|>`: reasoning. The channels `final` and `commentary` are
content, unless a recipient (`to=functions.NAME`, in the role or the channel part) makes the message a call. The
prompt has written the first `<|start|>assistant`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from muster.server.calls import Functions, checked_call
from muster.server.events import Content, Event, Reasoning
from muster.server.tags import Piece, TaggedParser, TagSplitter
from muster.server.tools import CallWriter

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
TAGS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)
_RECIPIENT = re.compile(r"\bto=(\S+)")


class HarmonyParser(TaggedParser):
    """Messages in, events out. See `Parser`.

    A call is told when its message is over and its arguments are a JSON object; otherwise the whole message is
    content. Text outside any message is content, a header without a message is nothing.

    Args:
        functions: what the request offers; None if it offers nothing, then no message is a call.
        writer: gives the calls their numbers and ids.
    """

    def __init__(self, functions: Functions | None, writer: CallWriter) -> None:
        super().__init__(TagSplitter(TAGS, breaks=0))
        self._functions = functions
        self._writer = writer
        self._header: list[Piece] = []
        self._body: list[str] = []
        self._message: type[Content] | type[Reasoning] | str | None = None

    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            if piece.tag in ENDS or piece.tag == START:
                yield from self._end()
                self._header = [piece] if piece.tag == START else []
            elif self._message is None:
                self._header.append(piece)
                if piece.tag == MESSAGE:
                    self._message = self._kind()
            elif isinstance(self._message, str):
                self._body.append(piece.text)
            else:
                yield self._message(piece.text)

    def _kind(self) -> type[Content] | type[Reasoning] | str:
        """What the message after this header is; a name: a call of that function."""
        header = "".join(piece.text for piece in self._header)
        recipient = _RECIPIENT.search(header.replace("<|", " <|"))
        if recipient is not None and self._functions is not None:
            name = recipient[1].removeprefix("functions.")
            if name != recipient[1] or name in self._functions:
                return name
        channel = header.partition(CHANNEL)[2].split(maxsplit=1)[:1]
        return Reasoning if channel and channel[0].startswith("analysis") else Content

    def _end(self) -> Iterator[Event]:
        """The message is over, or there was none."""
        header = "".join(piece.text for piece in self._header)
        if isinstance(self._message, str):
            body = "".join(self._body)
            try:
                call = checked_call(self._message, body)
            except ValueError:
                yield Content(header + body)
            else:
                yield from self._writer.events([call])
        elif self._message is None and not any(piece.tag for piece in self._header):
            yield Content(header)
        self._header, self._body, self._message = [], [], None
