"""Tool calls between tags, anywhere in an answer."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from muster.server import jsontext
from muster.server.calls import Call, Functions, Reader
from muster.server.events import Content, Event, ToolArguments, ToolCall
from muster.server.tags import Piece, TaggedParser, TagSplitter

_ID_LENGTH = 9
_ID_CHARACTERS = string.ascii_letters + string.digits


def new_id() -> str:
    """An id for a call: nine letters or digits, which is what Mistral's chat templates insist on."""
    return "".join(secrets.choice(_ID_CHARACTERS) for _ in range(_ID_LENGTH))


@dataclass(frozen=True)
class CallForm:
    """How calls are written: between which tags, and how the text between them reads.

    Attributes:
        opening: the tag before them.
        closing: the tag after them; None if only the end of the answer or the next call ends them.
        read: reader of the text between.
        quoted: whether the text between is JSON, whose strings may hold any tag, unless it begins with a tag itself.
        bounded: whether the text between shows itself that it is complete; if not, the closing tag must be there.
    """

    opening: str
    closing: str | None
    read: Reader
    quoted: bool = False
    bounded: bool = True


class CallWriter:
    """Numbers the calls of one answer and gives ids to those that have none."""

    def __init__(self, new_id: Callable[[], str] = new_id) -> None:
        self._new_id = new_id
        self._count = 0

    def events(self, calls: Iterable[Call]) -> Iterator[Event]:
        """The two events of each call."""
        for call in calls:
            yield ToolCall(self._count, call.id or self._new_id(), call.name)
            yield ToolArguments(self._count, call.arguments)
            self._count += 1


class CallParser(TaggedParser):
    """Calls and the content around them. See `Parser`.

    A call is told when it is complete and well formed, never before: a call that was told cannot be taken back. One
    that is malformed, tags included, is content. At the end of the answer a closing tag may be missing.

    Args:
        forms: the ways in which calls may be written; no two with the same opening tag.
        functions: what the request offers; decides the types of values that are written without quotes.
        writer: gives the calls their numbers and ids.
    """

    def __init__(self, forms: Sequence[CallForm], functions: Functions, writer: CallWriter) -> None:
        super().__init__(TagSplitter([tag for form in forms for tag in (form.opening, form.closing) if tag]))
        self._forms = {form.opening: form for form in forms}
        assert len(self._forms) == len(forms)
        self._functions = functions
        self._writer = writer
        self._form: CallForm | None = None
        self._pieces: list[str] = []

    def _events(self, pieces: Iterable[Piece]) -> Iterator[Event]:
        for piece in pieces:
            form = self._form
            if form is None:
                yield from self._outside(piece)
            elif piece.tag is None or piece.tag not in (form.opening, form.closing) or self._quoted(form):
                self._pieces.append(piece.text)
            elif piece.tag == form.closing:
                yield from self._end(piece.text)
            else:
                yield from self._end()
                yield from self._outside(piece)

    def _outside(self, piece: Piece) -> Iterator[Event]:
        self._form = self._forms.get(piece.tag or "")
        if self._form is None:
            yield Content(piece.text)
        else:
            self._pieces = [piece.text]

    def _quoted(self, form: CallForm) -> bool:
        """Whether a tag that comes now is within a string of the call."""
        body = "".join(self._pieces[1:])
        return form.quoted and not body.lstrip().startswith("<") and jsontext.inside_string(body)

    def _end(self, closing: str = "") -> Iterator[Event]:
        """Tells the calls that were held, or their text if that is not what it says."""
        if self._form is None:
            return
        try:
            if not closing and not self._form.bounded:
                raise ValueError("cut short")
            calls = self._form.read("".join(self._pieces[1:]), self._functions)
        except ValueError:
            yield Content("".join(self._pieces) + closing)
        else:
            yield from self._writer.events(calls)
        self._form, self._pieces = None, []
