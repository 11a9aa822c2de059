"""POST /v1/responses, for text: one message out, after its reasoning where the model tells any."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from muster.engine.request import RequestOutput
from muster.engine.tokenizer import Tokenizer
from muster.server.answers import Document, dumps
from muster.server.events import Content, Parser, Reasoning, merged
from muster.server.mailbox import Piece


class ResponseRenderer:
    """Words one response.

    Args:
        head: the fields that do not depend on the answer.
        parser: of its text.
        tokenizer: counts the tokens of the reasoning.
    """

    end = b""

    def __init__(self, head: Mapping[str, Any], parser: Parser, tokenizer: Tokenizer) -> None:
        self._head = dict(head)
        self._parser = parser
        self._tokenizer = tokenizer
        self._items: list[_Item] = []
        self._output: RequestOutput | None = None
        self._told = 0

    def frame(self, event: Document) -> bytes:
        """A named event, numbered."""
        event = {**event, "sequence_number": self._told}
        self._told += 1
        return f"event: {event['type']}\n".encode() + b"data: " + dumps(event) + b"\n\n"

    def opening(self) -> list[Document]:
        """The response, with nothing in it."""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        return [{"type": f"response.{what}", "response": response} for what in ("created", "in_progress")]

    def take(self, piece: Piece) -> list[Document]:
        """What the piece adds."""
        events = self._parser.feed(piece.text) if piece.text else ()
        if piece.output is not None:
            self._output = piece.output
            events = (*events, *self._parser.finish())
        return [told for event in merged(events) for told in self._tell(event)]

    def closing(self) -> list[Document]:
        """The end of the last item, and the whole."""
        whole = self.whole()
        return [
            *(self._items[-1].done() if self._items else ()),
            {"type": f"response.{whole['status']}", "response": whole},
        ]

    def whole(self) -> Document:
        """The response."""
        assert self._output is not None
        cut = self._output.finish_reason == "length"
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": [item.document("completed") for item in self._items],
            "usage": self._counts(self._output),
        }

    def _tell(self, event: object) -> Iterator[Document]:
        assert isinstance(event, Content | Reasoning)
        kind = _REASONING if isinstance(event, Reasoning) else _MESSAGE
        if not self._items or self._items[-1].kind is not kind:
            if self._items:
                yield from self._items[-1].done()
            self._items.append(_Item(kind, len(self._items)))
            yield from self._items[-1].added()
        yield self._items[-1].delta(event.text)

    def _counts(self, output: RequestOutput) -> Document:
        reasoning = "".join(item.text for item in self._items if item.kind is _REASONING)
        # Tags and words can share tokens, so those of the reasoning are counted as if it stood alone.
        reasoning_tokens = len(self._tokenizer.encode(reasoning)) if reasoning else 0
        used = output.usage
        return {
            "input_tokens": used.prompt_tokens,
            "input_tokens_details": {"cached_tokens": used.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": used.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": min(reasoning_tokens, used.completion_tokens)},
            "total_tokens": used.prompt_tokens + used.completion_tokens,
        }


@dataclass(frozen=True)
class _Kind:
    """How items of one kind, their one part and their events are called, and what they have besides text."""

    type: str
    prefix: str
    part: str
    item_fields: Document
    part_fields: Document
    event_fields: Document


_MESSAGE = _Kind(
    "message", "msg", "output_text", {"role": "assistant"}, {"annotations": [], "logprobs": []}, {"logprobs": []}
)
_REASONING = _Kind("reasoning", "rs", "reasoning_text", {"summary": []}, {}, {})


class _Item:
    """One item of the output, with one part of text."""

    def __init__(self, kind: _Kind, index: int) -> None:
        self.kind = kind
        self._id = f"{kind.prefix}_{secrets.token_hex(12)}"
        self._place: Document = {"item_id": self._id, "output_index": index, "content_index": 0}
        self._texts: list[str] = []

    @property
    def text(self) -> str:
        """All of it so far."""
        return "".join(self._texts)

    def document(self, status: str, *, empty: bool = False) -> Document:
        """The item."""
        content = [] if empty else [self._part(self.text)]
        return {"type": self.kind.type, "id": self._id, "status": status, "content": content, **self.kind.item_fields}

    def added(self) -> list[Document]:
        """Events of its beginning."""
        item = self.document("in_progress", empty=True)
        return [
            {"type": "response.output_item.added", "output_index": self._place["output_index"], "item": item},
            {"type": "response.content_part.added", **self._place, "part": self._part("")},
        ]

    def delta(self, text: str) -> Document:
        """The event of more text."""
        self._texts.append(text)
        return {"type": f"response.{self.kind.part}.delta", **self._place, "delta": text, **self.kind.event_fields}

    def done(self) -> list[Document]:
        """Events of its end."""
        end = {"type": f"response.{self.kind.part}.done", **self._place, "text": self.text}
        item = self.document("completed")
        return [
            {**end, **self.kind.event_fields},
            {"type": "response.content_part.done", **self._place, "part": self._part(self.text)},
            {"type": "response.output_item.done", "output_index": self._place["output_index"], "item": item},
        ]

    def _part(self, text: str) -> Document:
        return {"type": self.kind.part, "text": text, **self.kind.part_fields}
