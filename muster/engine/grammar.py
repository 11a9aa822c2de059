"""Answers that must match a grammar: JSON, a JSON schema, an EBNF grammar or a regular expression, through xgrammar.

A grammar decides at each step which tokens may come next; the others are masked before sampling. Special tokens are
no text and never match, nor do bytes that are not UTF-8. An id that ends the answer is allowed exactly where the
grammar allows the end, and where nothing else may follow the answer ends without one.
"""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor

from muster.engine import patterns
from muster.engine.schema import enforceable
from muster.engine.tokenizer import Tokenizer
from muster.errors import EnvironmentLackError, RequestError

Kind = Literal["json_object", "json_schema", "grammar", "regex"]
Bools: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]
Ids: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

_ANY_OBJECT = '{"type": "object"}'
_MOST_CHARACTERS = 1 << 16
# Room for indentation, and an end to a model that writes nothing but white space.
_SPACES = 40
_CACHE_BYTES = 256 << 20
_PLACE_IN_SOURCE = re.compile(r"\[[\d:]+\] \S+:\d+: (Check failed: \(.*?\) is false: )?")


@dataclass(frozen=True)
class Reasoning:
    """Free text before the part that must match.

    Attributes:
        opening: the id that opens it, if it is the first of the answer; None if only the prompt can open it.
        closing: the ids that end it.
        inside: the answer begins inside it.
    """

    opening: int | None
    closing: tuple[int, ...]
    inside: bool


@dataclass(frozen=True)
class Grammar:
    """A grammar, compiled for one tokenizer. Make it with `compile`; any thread may."""

    _compiled: Any
    _words: Words
    _reasoning: Reasoning | None = None

    @classmethod
    def compile(cls, kind: Kind, text: str, tokenizer: Tokenizer, vocab: int) -> Grammar:
        """A grammar for answers in this tokenizer's tokens.

        Args:
            kind: "json_object" takes no text; "json_schema" is what `muster.engine.schema` accepts; "grammar" is EBNF
                with the rule `root`; "regex" matches the whole answer.
            text: the schema, grammar or expression.
            tokenizer: of the model.
            vocab: V, how many logits the model has.

        Raises:
            RequestError: what is wrong with the grammar.
            EnvironmentLackError: xgrammar is not installed.
        """
        words = Words.of(tokenizer, vocab)
        if kind in ("grammar", "regex") and len(text) > _MOST_CHARACTERS:
            raise RequestError(kind, found=f"{len(text):,} characters", expected=f"at most {_MOST_CHARACTERS:,}")
        try:
            grammar = cls(_compile(words.compiler, kind, text), words)
        except RuntimeError as error:
            raise RequestError(kind, found=_PLACE_IN_SOURCE.sub("", str(error)).strip()) from error
        if not grammar.start(frozenset()).open:
            raise RequestError(kind, found="no text that matches", expected="one of at least a character")
        return grammar

    def after(self, reasoning: Reasoning) -> Grammar:
        """The same for what follows the reasoning of an answer."""
        return replace(self, _reasoning=reasoning)

    def start(self, stop_ids: frozenset[int]) -> Matcher:
        """At the beginning of an answer that these ids may end."""
        return Matcher(_xgrammar().GrammarMatcher(self._compiled), self._words, stop_ids, self._reasoning)


class Matcher:
    """How far one answer has come in its grammar."""

    def __init__(self, matcher: Any, words: Words, stop_ids: frozenset[int], reasoning: Reasoning | None) -> None:
        self._matcher = matcher
        self._words = words
        self._stops = np.array(sorted(stop for stop in stop_ids if stop < words.vocab), dtype=np.int64)
        self._opening = reasoning.opening if reasoning is not None else None
        self._closing = reasoning.closing if reasoning is not None else ()
        self._reasons = reasoning is not None and reasoning.inside
        self._recent: tuple[int, ...] = ()
        self._begun = b""
        self._allowed: Bools | None = None

    @property
    def done(self) -> bool:
        """Whether the answer is complete and nothing may follow."""
        return not self._reasons and bool(self._matcher.is_completed()) and not self.open

    @property
    def open(self) -> bool:
        """Whether some token may come next that does not end the answer."""
        return bool(np.delete(self._next(), self._stops).any())

    def mask(self, logits_V: Tensor) -> Tensor:
        """The logits with -inf for every token that may not come next."""
        allowed = self._next()
        if logits_V.device.type != "cpu":
            return logits_V.masked_fill(torch.from_numpy(~allowed).to(logits_V.device), -torch.inf)
        # On one thread: to wake the others takes longer than the work.
        return torch.from_numpy(np.where(allowed, logits_V.numpy(), np.float32(-np.inf)))

    def accept(self, token_id: int) -> None:
        """Takes the chosen token, one that `mask` left and that does not end the answer."""
        if self._reasons:
            self._recent = (*self._recent, token_id)[-len(self._closing) :]
            self._reasons = self._recent != self._closing
        elif token_id == self._opening:
            self._reasons = True
        else:
            accepted = self._matcher.accept_token(token_id)
            assert accepted, token_id
            self._begun = self._words.begun(self._begun, token_id)
        self._opening = None
        self._allowed = None

    def _next(self) -> Bools:
        """For each of V tokens whether it may come next."""
        if self._allowed is None:
            self._allowed = self._free() if self._reasons else self._matching()
        return self._allowed

    def _free(self) -> Bools:
        allowed = np.ones(self._words.vocab, np.bool_)
        allowed[self._stops] = False
        return allowed

    def _matching(self) -> Bools:
        bits = torch.full((1, -(-self._words.vocab // 32)), -1, dtype=torch.int32)
        self._matcher.fill_next_token_bitmask(bits)
        allowed = np.unpackbits(bits.numpy().view(np.uint8), bitorder="little")[: self._words.vocab].astype(np.bool_)
        allowed[self._words.broken(self._begun)] = False
        allowed[self._stops] = self._matcher.is_completed()
        if self._opening is not None:
            allowed[self._opening] = True
        return allowed


class Words:
    """The tokens of a model as bytes, and xgrammar's compiler for them.

    Attributes:
        vocab: V; ids without a token and special tokens are no bytes and never match.
        compiler: `xgrammar.GrammarCompiler`; any thread may use it.
    """

    def __init__(self, tokenizer: Tokenizer, vocab: int) -> None:
        library, special = _xgrammar(), tokenizer.special_ids
        words = [b"" if token_id in special else tokenizer.token_bytes(token_id) for token_id in range(vocab)]
        tokens = library.TokenizerInfo(words, library.VocabType.RAW, vocab_size=vocab, stop_token_ids=[])
        self.vocab = vocab
        self.compiler = library.GrammarCompiler(
            tokens, max_threads=torch.get_num_threads(), cache_limit_bytes=_CACHE_BYTES
        )
        self._parts = {token_id: word for token_id, word in enumerate(words) if not _is_text(word)}
        self._broken: dict[bytes, Ids] = {}

    @staticmethod
    @cache
    def of(tokenizer: Tokenizer, vocab: int) -> Words:
        """The words of a tokenizer, made once."""
        return Words(tokenizer, vocab)

    def begun(self, begun: bytes, token_id: int) -> bytes:
        """The bytes of a character that is not complete after this token."""
        word = self._parts.get(token_id)
        return b"" if word is None else _unfinished(begun + word) or b""

    def broken(self, begun: bytes) -> Ids:
        """Tokens that are parts of characters and make no UTF-8 after these bytes: xgrammar lets some of them pass."""
        found = self._broken.get(begun)
        if found is None:
            ids = [token_id for token_id, word in self._parts.items() if _unfinished(begun + word) is None]
            found = self._broken[begun] = np.array(ids, dtype=np.int64)
        return found


def _is_text(word: bytes) -> bool:
    return _unfinished(word) == b""


def _unfinished(word: bytes) -> bytes | None:
    """The bytes at the end that begin a character; None if the bytes are no UTF-8 whatever follows."""
    try:
        _, used = codecs.utf_8_decode(word, "strict", False)
    except UnicodeDecodeError:
        return None
    rest = word[used:]
    # The decoder waits for the third byte of a surrogate before it refuses one.
    return None if rest[:1] == b"\xed" and rest[1:2] >= b"\xa0" else rest


def _compile(compiler: Any, kind: Kind, text: str) -> Any:
    match kind:
        case "json_object":
            # Not strict: an object of any members.
            return compiler.compile_json_schema(_ANY_OBJECT, strict_mode=False, max_whitespace_cnt=_SPACES)
        case "json_schema":
            return compiler.compile_json_schema(enforceable(text), max_whitespace_cnt=_SPACES)
        case "grammar":
            return compiler.compile_grammar(text)
        case "regex":
            return compiler.compile_regex(patterns.rewritten(text))


def _xgrammar() -> ModuleType:
    try:
        import xgrammar
    except ImportError as error:
        raise EnvironmentLackError(
            "xgrammar", found="not installed", expected="it, for grammars", hint="pip install 'muster-moe[server]'"
        ) from error
    return xgrammar
