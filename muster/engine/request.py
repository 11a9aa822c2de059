"""SamplingParams in, RequestOutput out, and the Request that lives in between. No torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol

from muster.engine.pages import PageTable
from muster.engine.text import TextStream
from muster.errors import MusterError, RequestError

FinishReason = Literal["stop", "length", "error", "abort"]


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request's tokens are chosen. Checked when made; the order of operations is that of `engine.sampling`.

    Attributes:
        max_tokens: most tokens to generate; the context may end it earlier.
        temperature: divides the logits; 0 means greedy (the largest logit, the lowest id among equals).
        top_k: keep this many best tokens; 0 keeps all.
        top_p: keep the fewest best tokens whose probabilities reach this sum.
        min_p: drop tokens less probable than this times the best one.
        repetition_penalty: divides positive and multiplies negative logits of every token in prompt or answer.
        presence_penalty: subtracted once from the logit of every token in the answer.
        frequency_penalty: subtracted once per occurrence in the answer.
        logit_bias: (id, number added to its logit) pairs, or a mapping of them; after the penalties.
        seed: the same seed, prompt and options give the same tokens; None draws a fresh seed for each request.
        logprobs: report each token's log-probability and those of this many best ones; None reports nothing.
        stop: strings that end the answer; none of them is part of its text.
        stop_token_ids: ids that end the answer, besides the model's own.
        ignore_eos: the model's own end-of-sequence ids do not end the answer.
        skip_special_tokens: leave special tokens out of the text.

    Raises:
        RequestError: every option that cannot be used, at once.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    seed: int | None = None
    logprobs: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        for name in ("stop", "stop_token_ids"):
            value = getattr(self, name)
            if isinstance(value, str | list | set | frozenset):
                object.__setattr__(self, name, (value,) if isinstance(value, str) else tuple(value))
        if isinstance(self.logit_bias, Mapping):
            object.__setattr__(self, "logit_bias", tuple(self.logit_bias.items()))
        problems = []
        for option in fields(self):
            value = getattr(self, option.name)
            accepts, expected = _RULES[option.name]
            if not accepts(value):
                problems.append(RequestError(option.name, found=repr(value), expected=expected))
        error = RequestError.gather("sampling options", problems)
        if error is not None:
            raise error

    @property
    def greedy(self) -> bool:
        """Whether no randomness is involved."""
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        """Whether earlier tokens change the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)


def _whole(low: int, high: float = math.inf) -> Callable[[object], bool]:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _real(accepts: Callable[[float], bool]) -> Callable[[object], bool]:
    def check(value: object) -> bool:
        if not isinstance(value, int | float) or isinstance(value, bool):
            return False
        return math.isfinite(value) and accepts(value)

    return check


def _or_none(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: value is None or accepts(value)


def _pair(value: object) -> bool:
    number = _real(lambda x: abs(x) <= 100)
    return isinstance(value, tuple) and len(value) == 2 and _whole(0)(value[0]) and number(value[1])


def _each(accepts: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda values: isinstance(values, tuple) and all(map(accepts, values))


_RULES: dict[str, tuple[Callable[[object], bool], str]] = {
    "max_tokens": (_whole(1), "a whole number of at least 1"),
    "temperature": (_real(lambda x: x >= 0), "a number of at least 0"),
    "top_k": (_whole(0), "a whole number of at least 0 (0 keeps all tokens)"),
    "top_p": (_real(lambda x: 0 < x <= 1), "a number above 0 and at most 1"),
    "min_p": (_real(lambda x: 0 <= x <= 1), "a number from 0 to 1"),
    "repetition_penalty": (_real(lambda x: 0.01 <= x <= 100), "a number from 0.01 to 100 (1 changes nothing)"),
    "presence_penalty": (_real(lambda x: abs(x) <= 100), "a number from -100 to 100"),
    "frequency_penalty": (_real(lambda x: abs(x) <= 100), "a number from -100 to 100"),
    "logit_bias": (_each(_pair), "token ids with a number from -100 to 100 each"),
    "seed": (_or_none(_whole(0, (1 << 64) - 1)), "a whole number from 0 to 2^64 - 1, or None"),
    "logprobs": (_or_none(_whole(0)), "a whole number of at least 0, or None"),
    "stop": (_each(lambda x: isinstance(x, str) and x != ""), "strings that are not empty"),
    "stop_token_ids": (_each(_whole(0)), "token ids"),
    "ignore_eos": (lambda x: isinstance(x, bool), "True or False"),
    "skip_special_tokens": (lambda x: isinstance(x, bool), "True or False"),
}


class Matcher(Protocol):
    """How far one answer has come in its grammar."""

    @property
    def done(self) -> bool:
        """Whether the answer is complete and nothing may follow."""

    def mask(self, logits_V: Any) -> Any:
        """The logits with -inf for every token that the grammar does not allow next."""

    def accept(self, token_id: int) -> None:
        """Takes the chosen token."""


class Grammar(Protocol):
    """What an answer must look like."""

    def start(self, stop_ids: frozenset[int]) -> Matcher:
        """At the beginning of an answer that these ids may end."""


@dataclass(frozen=True)
class TokenLogprob:
    """One generated token's natural log-probability in the model's own distribution, before any sampling option.

    `best` holds (id, log-probability) of the most probable tokens, best first.
    """

    token_id: int
    logprob: float
    best: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class Usage:
    """Tokens of one request; `cached_tokens` of the prompt were found in the cache and not computed."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class RequestOutput:
    """One answer.

    Attributes:
        text: the answer, without special tokens and without the stop string; empty if there is no tokenizer.
        token_ids: every generated id, the one that ended it included.
        finish_reason: "stop" (a stop id or string), "length" (max_tokens or the context), "error", or "abort".
        usage: tokens counted.
        stopped_by: the stop string or stop id, when the reason is "stop"; None when its grammar is complete.
        logprobs: one per generated id if they were asked for.
        error: what went wrong, when the reason is "error".
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    stopped_by: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
    error: str | None = None


@dataclass(eq=False)
class Request:
    """One request on its way through the engine.

    Attributes:
        prompt: token ids.
        params: its sampling options.
        limit: most tokens in all, prompt included.
        stop_ids: ids that end it.
        seed: what its random numbers derive from.
        text: its answer as text.
        grammar: what its answer must match, None when anything goes.
        matcher: how far it has come in that.
        tokens: prompt and answer so far.
        computed: how many of `tokens` have keys and values in the cache.
        cached_prompt: prompt tokens found in the cache when it was first admitted; None before that.
        table: its pages, None while it waits.
        finish_reason: None while it lives.
        failure: what went wrong, when the reason is "error": of the numbers, or of the request.
    """

    prompt: tuple[int, ...]
    params: SamplingParams
    limit: int
    stop_ids: frozenset[int]
    seed: int
    text: TextStream
    grammar: Grammar | None = None
    matcher: Matcher | None = field(init=False)
    tokens: list[int] = field(init=False)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    computed: int = 0
    cached_prompt: int | None = None
    table: PageTable | None = None
    finish_reason: FinishReason | None = None
    stopped_by: str | int | None = None
    failure: MusterError | None = None
    _settled: int = field(init=False)
    _told: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)
        self.matcher = self.grammar.start(self.stop_ids) if self.grammar is not None else None
        self._settled = len(self.tokens)

    @property
    def pending(self) -> int:
        """Tokens that are known and not yet computed."""
        return len(self.tokens) - self.computed

    @property
    def answer(self) -> list[int]:
        """Generated ids."""
        return self.tokens[len(self.prompt) :]

    def append(self, token_id: int, logprob: TokenLogprob | None) -> None:
        """Takes a generated token and decides whether it is the last."""
        self.tokens.append(token_id)
        if logprob is not None:
            self.logprobs.append(logprob)
        if token_id in self.stop_ids:
            self.finish("stop", stopped_by=token_id)
            return
        if self.matcher is not None:
            self.matcher.accept(token_id)
        stop = self.text.push(token_id)
        if stop is not None:
            self.finish("stop", stopped_by=stop)
        elif self.matcher is not None and self.matcher.done:
            self.finish("stop")
        elif len(self.tokens) >= self.limit:
            self.finish("length")
        self._settled = len(self.tokens)

    def rewind(self) -> None:
        """Nothing of it is in the cache any more; a token whose taking was interrupted is undone."""
        self.table, self.computed = None, 0
        del self.tokens[self._settled :]
        del self.logprobs[len(self.answer) :]
        self.text = self.text.replay(self.answer)
        if self.grammar is not None:
            self.matcher = self.grammar.start(self.stop_ids)
            for token_id in self.answer:
                self.matcher.accept(token_id)

    def finish(
        self, reason: FinishReason, *, stopped_by: str | int | None = None, failure: MusterError | None = None
    ) -> None:
        """Ends it; text that was held back comes out, unless that completes a stop string."""
        stop = self.text.close()
        if stop is not None and reason in ("stop", "length"):
            reason, stopped_by = "stop", stop
        self.stopped_by, self.failure = stopped_by, failure
        self.finish_reason = reason

    def news(self) -> str:
        """The text that came out since the last call."""
        start, self._told = self._told, len(self.text.text)
        return self.text.text[start:]

    def output(self) -> RequestOutput:
        """The finished answer."""
        assert self.finish_reason is not None
        completion = len(self.tokens) - len(self.prompt)
        return RequestOutput(
            text=self.text.text,
            token_ids=tuple(self.answer),
            finish_reason=self.finish_reason,
            usage=Usage(len(self.prompt), self.cached_prompt or 0, completion),
            stopped_by=self.stopped_by,
            logprobs=tuple(self.logprobs) if self.params.logprobs is not None else None,
            error=str(self.failure) if self.failure is not None else None,
        )
