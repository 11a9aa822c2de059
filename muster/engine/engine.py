"""The engine: requests go in, each step computes the next tokens of as many as fit, answers come out."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from functools import partial

import torch

from muster.device import free_memory
from muster.engine import canary
from muster.engine.batch import build
from muster.engine.executor import Executor
from muster.engine.pages import PagePool
from muster.engine.request import Grammar, Request, SamplingParams
from muster.engine.sampling import Sampled, sample
from muster.engine.scheduler import Scheduler, Work
from muster.engine.stats import Stats, Step
from muster.engine.text import Decode, TextStream
from muster.engine.tokenizer import Tokenizer
from muster.errors import NumericsError, RequestError, UsageError
from muster.model.decoder import Decoder
from muster.plan import Role

_DEFAULT_SEQUENCES = 4
_DEFAULT_MEMORY_FRACTION = 0.25


class Engine:
    """Serves requests on one decoder. Not for use from several threads at once.

    Args:
        decoder: the model.
        tokenizer: for the text of answers; None leaves it empty.
        context: most tokens of a sequence; None takes the model's own limit.
        kv_bytes: size of the key-value cache. None takes what four sequences of full context need, but no more than
            a quarter of the memory that is free now.
        page_size: tokens per page, the unit in which the cache is shared and prefixes are reused.
        max_batch: most requests that run at once.
        token_budget: most tokens in one step; longer prompts are computed in chunks.

    Raises:
        UsageError: every argument that cannot be used, at once.
        NumericsError: what the decoder computes is wrong; everything the canary saw.
    """

    def __init__(
        self,
        decoder: Decoder,
        tokenizer: Tokenizer | None = None,
        *,
        context: int | None = None,
        kv_bytes: int | None = None,
        page_size: int = 16,
        max_batch: int = 64,
        token_budget: int = 512,
    ) -> None:
        spec = decoder.spec
        _check_arguments(spec.context, context, page_size, max_batch, token_budget)
        self.context = context or spec.context
        self._vocab = spec.vocab
        self._eos_ids = frozenset(spec.eos_ids)
        self._tokenizer = tokenizer
        self._executor = Executor(
            decoder,
            page_size=page_size,
            kv_bytes=int(free_memory(decoder.device.torch_device) * _DEFAULT_MEMORY_FRACTION)
            if kv_bytes is None
            else kv_bytes,
            most_tokens=self.context * min(max_batch, _DEFAULT_SEQUENCES if kv_bytes is None else max_batch),
        )
        canary.sing(decoder)
        self._scheduler = Scheduler(PagePool(self._executor.pages, page_size), max_batch, token_budget)
        self._step: Step | None = None
        self._sums = Stats(backends=decoder.plan.backends(Role.EXPERTS), weight_bytes_per_token=decoder.token_bytes)

    @property
    def limit(self) -> int:
        """Most tokens a sequence can have: the context, or what the whole key-value cache holds."""
        return min(self.context, self._executor.pages * self._executor.page_size)

    @property
    def idle(self) -> bool:
        """Whether no request lives."""
        return not self._scheduler.running and not self._scheduler.waiting

    @property
    def pages(self) -> int:
        """Pages of the cache."""
        return self._executor.pages

    @property
    def free_pages(self) -> int:
        """Pages that no living request holds."""
        return self._scheduler.pool.available

    @property
    def running(self) -> int:
        """Requests that hold pages."""
        return len(self._scheduler.running)

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return len(self._scheduler.waiting)

    @property
    def last_step(self) -> Step | None:
        """The step that is being computed or was computed last."""
        return self._step

    @property
    def stats(self) -> Stats:
        """Everything since the engine was made."""
        return self._sums.plus(preemptions=self._scheduler.preemptions)

    def request(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        grammar: Grammar | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> Request:
        """A request for `add`, checked. Any thread may make one.

        Args:
            prompt: token ids.
            params: how its tokens are chosen.
            grammar: what its answer must match.
            keep: special tokens that are text in its answer.

        Raises:
            RequestError: every reason why it cannot be served, at once.
        """
        error = RequestError.gather("request", list(self._problems(prompt, params)))
        if error is not None:
            raise error
        return Request(
            prompt=tuple(prompt),
            params=params,
            limit=min(len(prompt) + params.max_tokens, self.limit),
            stop_ids=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos_ids),
            seed=secrets.randbits(64) if params.seed is None else params.seed,
            text=TextStream(self._decode(params, keep), prompt, params.stop),
            grammar=grammar,
        )

    def add(self, request: Request) -> None:
        """Puts a request at the end of the queue."""
        self._scheduler.waiting.append(request)

    def abort(self, request: Request) -> None:
        """Ends a request now and frees its pages; nothing if it has ended."""
        if request.finish_reason is not None:
            return
        try:
            request.finish("abort")
            self._end(request)
        except BaseException:
            self._scheduler.restart()
            raise

    def step(self) -> list[Request]:
        """Computes one step; the requests that got a token or ended in it, none when there is nothing to do.

        If anything stops a step half-way, an interrupt included, nothing it left behind is trusted: the cache is
        emptied and the requests that live are computed again from their tokens, to the same end.
        """
        start = time.perf_counter()
        try:
            with torch.inference_mode():
                work = self._scheduler.schedule()
                if not work:
                    return []
                self._step = _step_of(work, self._sums.steps + 1)
                logits_RV = self._executor.run(build(work, self._executor.page_size))
                ready = [item.request for item in work if item.completes]
                chosen = sample(logits_RV, ready)
                self._scheduler.commit(work)
                self._commit(ready, chosen)
        except BaseException:
            self._scheduler.restart()
            raise
        self._report(work, len(ready), time.perf_counter() - start)
        return ready

    def check_integrity(self) -> None:
        """Asserts that every page is accounted for."""
        self._scheduler.check_integrity()

    def _decode(self, params: SamplingParams, keep: frozenset[str]) -> Decode | None:
        if self._tokenizer is None:
            return None
        return partial(self._tokenizer.decode, skip_special_tokens=params.skip_special_tokens, keep=keep)

    def _problems(self, prompt: Sequence[int], params: SamplingParams) -> list[RequestError]:
        problems = []
        if not prompt:
            problems.append(RequestError("prompt", found="no tokens", expected="at least one"))
        foreign = sorted({token for token in prompt if not 0 <= token < self._vocab})
        if foreign:
            expected = f"ids from 0 to {self._vocab - 1}"
            problems.append(RequestError("prompt", found=f"token ids {foreign[:5]}", expected=expected))
        outside = [token for token, _ in params.logit_bias if token >= self._vocab]
        if outside:
            expected = f"ids from 0 to {self._vocab - 1}"
            problems.append(RequestError("logit_bias", found=f"token ids {outside[:5]}", expected=expected))
        if len(prompt) >= self.limit:
            owner = "the context is" if self.limit == self.context else "the key-value cache holds"
            problems.append(
                RequestError(
                    "prompt",
                    found=f"{len(prompt)} tokens",
                    expected=f"at most {self.limit - 1}: {owner} {self.limit}, one of them for the answer",
                    hint="shorten it" if self.limit == self.context else "shorten it, or give more kv_bytes",
                )
            )
        if params.stop and self._tokenizer is None:
            problems.append(RequestError("stop strings", found="no tokenizer", expected="stop_token_ids instead"))
        return problems

    def _commit(self, ready: Sequence[Request], chosen: Sequence[Sampled | NumericsError | RequestError]) -> None:
        for request, result in zip(ready, chosen, strict=True):
            if isinstance(result, Sampled):
                request.append(result.token_id, result.logprob)
            else:
                request.finish("error", failure=result)
            if request.finish_reason is not None:
                self._end(request)

    def _end(self, request: Request) -> None:
        self._scheduler.remove(request, forget=request.finish_reason == "error")
        self._sums = self._sums.plus(prompt_tokens=len(request.prompt), cached_tokens=request.cached_prompt or 0)

    def _report(self, work: Sequence[Work], generated: int, seconds: float) -> None:
        tokens = sum(item.end - item.start for item in work)
        if tokens == generated and all(item.start >= len(item.request.prompt) for item in work):
            self._sums = self._sums.plus(
                steps=1, generated_tokens=generated, decode_tokens=generated, decode_seconds=seconds
            )
        else:
            self._sums = self._sums.plus(
                steps=1, generated_tokens=generated, prefill_tokens=tokens, prefill_seconds=seconds
            )


def _step_of(work: Sequence[Work], number: int) -> Step:
    rows = tuple((len(item.request.prompt), item.start, item.end) for item in work)
    return Step(number, time.time(), rows)


def _check_arguments(most: int, context: int | None, page_size: int, max_batch: int, token_budget: int) -> None:
    problems = []
    if context is not None and not 1 < context <= most:
        expected = f"from 2 to the model's own {most}"
        problems.append(UsageError("context", found=str(context), expected=expected))
    for name, value in (("page_size", page_size), ("max_batch", max_batch), ("token_budget", token_budget)):
        if value < 1:
            problems.append(UsageError(name, found=str(value), expected="at least 1"))
    error = UsageError.gather("engine", problems)
    if error is not None:
        raise error
