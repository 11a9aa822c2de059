"""POST /v1/completions: texts in, their continuations out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from muster.engine.request import RequestOutput, TokenLogprob
from muster.engine.tokenizer import Tokenizer
from muster.server.answers import Document, Extras, data
from muster.server.chat import finite, usage
from muster.server.mailbox import Piece


class CompletionRenderer:
    """Words the continuations of one or more prompts.

    Args:
        head: id, created and model, which every document has.
        answers: continuations in all.
        each: continuations of each prompt.
        tokenizer: for the tokens of log-probabilities.
        extras: what else was asked for.
    """

    end = b"data: [DONE]\n\n"
    frame = staticmethod(data)

    def __init__(
        self,
        head: Mapping[str, Any],
        answers: int,
        each: int,
        tokenizer: Tokenizer | None,
        extras: Extras,
    ) -> None:
        self._head = {**head, "object": "text_completion"}
        self._each = each
        self._tokenizer = tokenizer
        self._extras = extras
        self._choices = [_Choice() for _ in range(answers)]

    def opening(self) -> list[Document]:
        """Nothing."""
        return []

    def take(self, piece: Piece) -> list[Document]:
        """One chunk, unless the piece says nothing that was asked for."""
        choice = self._choices[piece.index]
        document: Document = {"index": piece.index, "text": piece.text, "logprobs": None, "finish_reason": None}
        choice.text.append(piece.text)
        choice.output = piece.output
        if self._extras.logprobs and piece.logprobs:
            document["logprobs"] = choice.logprobs.extend(self._tokenizer, piece.logprobs)
        if self._extras.token_ids:
            choice.token_ids += piece.token_ids
            document["token_ids"] = piece.token_ids
        if piece.output is not None:
            document["finish_reason"] = piece.output.finish_reason
        elif not (piece.text or document["logprobs"] or document.get("token_ids")):
            return []
        return [{**self._head, "choices": [document], **({"usage": None} if self._extras.usage else {})}]

    def closing(self) -> list[Document]:
        """The usage, if it was asked for."""
        return [{**self._head, "choices": [], "usage": self._counts()}] if self._extras.usage else []

    def whole(self) -> Document:
        """The completion."""
        choices = []
        for index, choice in enumerate(self._choices):
            assert choice.output is not None
            document: Document = {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": choice.logprobs.document() if self._extras.logprobs else None,
                "finish_reason": choice.output.finish_reason,
            }
            if self._extras.token_ids:
                document["token_ids"] = choice.token_ids
            choices.append(document)
        return {**self._head, "choices": choices, "usage": self._counts()}

    def _counts(self) -> Document:
        """Usage over all prompts, each counted once."""
        outputs = [choice.output for choice in self._choices if choice.output is not None]
        counts = [usage(outputs[start : start + self._each]) for start in range(0, len(outputs), self._each)]
        sums = {name: sum(count[name] for count in counts) for name in counts[0] if name.endswith("_tokens")}
        cached = sum(count["prompt_tokens_details"]["cached_tokens"] for count in counts)
        return {**sums, "prompt_tokens_details": {"cached_tokens": cached}}


class _Logprobs:
    """Log-probabilities in the parallel lists of OpenAI's older API; an offset counts the characters before a token."""

    def __init__(self) -> None:
        self._lists: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        self._offset = 0

    def extend(self, tokenizer: Tokenizer | None, entries: Sequence[TokenLogprob]) -> Document:
        """Takes the next ones; these alone as a document."""
        before = len(self._lists["tokens"])
        for entry in entries:
            word = _word(tokenizer, entry.token_id)
            best = {_word(tokenizer, token_id): finite(logprob) for token_id, logprob in entry.best}
            values = (word, finite(entry.logprob), {**best, word: finite(entry.logprob)}, self._offset)
            for items, value in zip(self._lists.values(), values, strict=True):
                items.append(value)
            self._offset += len(word)
        return {name: items[before:] for name, items in self._lists.items()}

    def document(self) -> Document:
        """All of them."""
        return dict(self._lists)


def _word(tokenizer: Tokenizer | None, token_id: int) -> str:
    """A token's text; its bytes where it is no text, its id where there is no tokenizer."""
    if tokenizer is None:
        return f"token_id:{token_id}"
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class _Choice:
    """One continuation as far as it has come."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.token_ids: list[int] = []
        self.logprobs = _Logprobs()
        self.output: RequestOutput | None = None
