"""POST /v1/chat/completions: a conversation in, messages out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.engine.request import RequestOutput, TokenLogprob
from muster.engine.tokenizer import Tokenizer
from muster.server.answers import Document, Extras, data
from muster.server.events import Content, Event, Parser, Reasoning, ToolArguments, ToolCall, merged
from muster.server.mailbox import Piece


class PlainParser:
    """Everything is content."""

    def feed(self, text: str) -> tuple[Event, ...]:
        """The text."""
        return (Content(text),) if text else ()

    def finish(self) -> tuple[Event, ...]:
        """Nothing is held back."""
        return ()


class ChatRenderer:
    """Words the answers to one conversation.

    Args:
        head: id, created and model, which every document has.
        parsers: one for each answer.
        tokenizer: for the tokens of log-probabilities.
        extras: what else was asked for.
    """

    end = b"data: [DONE]\n\n"
    frame = staticmethod(data)

    def __init__(
        self,
        head: Mapping[str, Any],
        parsers: Sequence[Parser],
        tokenizer: Tokenizer,
        extras: Extras,
    ) -> None:
        self._head = dict(head)
        self._tokenizer = tokenizer
        self._extras = extras
        self._choices = [_Choice(index, parser) for index, parser in enumerate(parsers)]

    def opening(self) -> list[Document]:
        """A chunk with the role for each answer."""
        return [self._chunk(choice.index, {"role": "assistant", "content": ""}) for choice in self._choices]

    def take(self, piece: Piece) -> list[Document]:
        """A chunk for each event in the piece; log-probabilities and ids are in the first, the reason in the last."""
        choice = self._choices[piece.index]
        deltas = choice.take(piece)
        more: Document = {}
        if self._extras.logprobs and piece.logprobs:
            words = [logprob_entry(self._tokenizer, entry) for entry in piece.logprobs]
            choice.logprobs += words
            more["logprobs"] = {"content": words, "refusal": None}
        if self._extras.token_ids and piece.token_ids:
            choice.token_ids += piece.token_ids
            more["token_ids"] = piece.token_ids
        if more and not deltas:
            deltas = [{"content": ""}]
        chunks = [self._chunk(piece.index, delta, more if number == 0 else {}) for number, delta in enumerate(deltas)]
        if choice.output is not None:
            chunks.append(self._chunk(piece.index, {}, {"finish_reason": choice.finish_reason}))
        return chunks

    def closing(self) -> list[Document]:
        """The usage, if it was asked for."""
        if not self._extras.usage:
            return []
        return [{**self._head, "object": "chat.completion.chunk", "choices": [], "usage": self._counts()}]

    def whole(self) -> Document:
        """The completion."""
        choices = []
        for choice in self._choices:
            document: Document = {
                "index": choice.index,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._extras.logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            if self._extras.token_ids:
                document["token_ids"] = choice.token_ids
            choices.append(document)
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._counts()}

    def _chunk(self, index: int, delta: Document, more: Mapping[str, Any] | None = None) -> Document:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None, **(more or {})}
        chunk: Document = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        if self._extras.usage:
            chunk["usage"] = None
        return chunk

    def _counts(self) -> Document:
        return usage([choice.output for choice in self._choices if choice.output is not None])


class _Choice:
    """One answer as far as it has come."""

    def __init__(self, index: int, parser: Parser) -> None:
        self.index = index
        self.output: RequestOutput | None = None
        self.logprobs: list[Document] = []
        self.token_ids: list[int] = []
        self._parser = parser
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[Document] = []

    @property
    def finish_reason(self) -> str:
        """As OpenAI words it."""
        assert self.output is not None
        return "tool_calls" if self._calls and self.output.finish_reason == "stop" else self.output.finish_reason

    def take(self, piece: Piece) -> list[Document]:
        """What the piece adds to the message."""
        events = self._parser.feed(piece.text) if piece.text else ()
        if piece.output is not None:
            self.output = piece.output
            events = (*events, *self._parser.finish())
        return [self._delta(event) for event in merged(events)]

    def message(self) -> Document:
        """The whole message."""
        content = "".join(self._content)
        message: Document = {"role": "assistant", "content": content if content or not self._calls else None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = self._calls
        return {**message, "refusal": None}

    def _delta(self, event: Event) -> Document:
        match event:
            case Content(text):
                self._content.append(text)
                return {"content": text}
            case Reasoning(text):
                self._reasoning.append(text)
                return {"reasoning_content": text}
            case ToolCall(index, id, name):
                assert index == len(self._calls)
                self._calls.append({"id": id, "type": "function", "function": {"name": name, "arguments": ""}})
                function = {"name": name, "arguments": ""}
                return {"tool_calls": [{"index": index, "id": id, "type": "function", "function": function}]}
            case ToolArguments(index, text):
                self._calls[index]["function"]["arguments"] += text
                return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}


def logprob_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> Document:
    """One token's log-probability and those of the best, as chat completions have them."""
    best = [_token(tokenizer, token_id, logprob) for token_id, logprob in entry.best]
    return {**_token(tokenizer, entry.token_id, entry.logprob), "top_logprobs": best}


def _token(tokenizer: Tokenizer, token_id: int, logprob: float) -> Document:
    raw = tokenizer.token_bytes(token_id)
    return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def finite(logprob: float) -> float:
    """JSON has no infinity; OpenAI says -9999 for what cannot come."""
    return max(logprob, -9999.0)


def usage(outputs: Sequence[RequestOutput]) -> Document:
    """Tokens of the answers; a prompt that several share counts once."""
    prompt = outputs[0].usage.prompt_tokens if outputs else 0
    completion = sum(output.usage.completion_tokens for output in outputs)
    cached = outputs[0].usage.cached_tokens if outputs else 0
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
