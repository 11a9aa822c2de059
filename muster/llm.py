"""The offline API: the whole system on one screen.

    from muster import LLM, SamplingParams

    llm = LLM("path/to/checkpoint")
    [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=16))
    print(answer.text)

A checkpoint directory becomes a decoder (`model.families.load`), a decoder and a tokenizer become an engine
(`engine.engine.Engine`), and every call below makes requests of prompts and steps the engine until they end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from muster import env
from muster.device import here
from muster.engine.engine import Engine
from muster.engine.request import Request, RequestOutput, SamplingParams
from muster.engine.stats import Stats
from muster.engine.tokenizer import Message, Tokenizer
from muster.errors import RequestError, UsageError
from muster.model.choosing import unproven as choose_unproven
from muster.model.families import load
from muster.plan import Choose, Plan

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Delta:
    """A piece of a streamed answer; `output` is the whole answer, with the last piece only."""

    text: str
    output: RequestOutput | None = None


class LLM:
    """A checkpoint, loaded and ready to answer. Not for use from several threads at once.

    It runs on the first GPU when there is one; MUSTER_DEVICE=cpu keeps it on the processor.

    Args:
        directory: a checkpoint: config.json, safetensors, and a tokenizer unless all prompts are token ids.
        moe_backend: the expert backend by name; None lets the plan choose.
        plan: which proven backend runs for which token count. None takes the saved plan of this checkpoint or, where
            its evidence does not count here or there is none, proves and times every backend now, which takes seconds.
        unproven: choose by declared facts instead, whatever the evidence says.
        max_context: most tokens of prompt and answer together; None takes the model's own limit.
        kv_bytes: bytes of key-value cache; None takes what four sequences of full context need, but no more than a
            quarter of the memory that is free after loading.
        page_size: tokens per cache page.
        max_batch: most requests computed together.
        token_budget: most tokens computed in one step.
        threads: CPU threads; None takes MUSTER_THREADS.
        progress: called while loading with the bytes read so far and the bytes of all tensors.

    Raises:
        InputError: a bad argument, config or checkpoint, with every problem found.
        UnprovenError: a part that no proven backend can run, or `moe_backend` is not proven.
        NumericsError: what the loaded model computes is wrong (`engine.canary`).
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        moe_backend: str | None = None,
        plan: Plan | None = None,
        unproven: bool = False,
        max_context: int | None = None,
        kv_bytes: int | None = None,
        page_size: int = 16,
        max_batch: int = 64,
        token_budget: int = 512,
        threads: int | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        torch.set_num_threads(env.read().threads if threads is None else threads)
        self._directory = Path(directory)
        choose = self._chooser(moe_backend, plan, unproven)
        self.decoder = load(self._directory, choose=choose, device=here(), progress=progress)
        self._tokenizer = Tokenizer.open(self._directory) if Tokenizer.present(self._directory) else None
        self.engine = Engine(
            self.decoder,
            self._tokenizer,
            context=max_context,
            kv_bytes=kv_bytes,
            page_size=page_size,
            max_batch=max_batch,
            token_budget=token_budget,
        )

    def _chooser(self, moe_backend: str | None, plan: Plan | None, unproven: bool) -> Choose:
        if plan is not None and (moe_backend is not None or unproven):
            raise UsageError("plan", found="moe_backend or unproven beside it", expected="one of them")
        if unproven:
            return choose_unproven(here(), moe_backend)
        if plan is None:
            from muster.lab.choose.planner import obtain

            plan = obtain(self._directory, moe_backend=moe_backend)
        return plan.choice

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            CheckpointError: it has none.
        """
        return self._tokenizer or Tokenizer.open(self._directory)

    @property
    def has_tokenizer(self) -> bool:
        """Whether prompts may be text."""
        return self._tokenizer is not None

    @property
    def stats(self) -> Stats:
        """What has been done since loading; `llm.stats.since(earlier)` is what one call did."""
        return self.engine.stats

    def generate(
        self, prompts: str | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Completes prompts, all in one batch; one answer each, in their order.

        Args:
            prompts: one text, or a list of texts or of token id lists.
            params: the same for all, or one for each; None is `SamplingParams()`.

        Raises:
            RequestError: what is wrong with any of the prompts, before any is computed.
        """
        prompts = [prompts] if isinstance(prompts, str) else list(prompts)
        options = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sequence) else list(params)
        if len(options) != len(prompts):
            raise RequestError("params", found=f"{len(options)}", expected=f"one, or {len(prompts)}: one per prompt")
        requests, problems = [], []
        for index, (prompt, option) in enumerate(zip(prompts, options, strict=True)):
            try:
                requests.append(self._request(prompt, option))
            except RequestError as error:
                problems.append(RequestError(f"prompt {index}", reasons=error.reasons))
        refusal = RequestError.gather("prompts", problems)
        if refusal is not None:
            raise refusal
        return self._run(requests)

    def chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> RequestOutput:
        """Answers a conversation: `{"role": "user", "content": "..."}` and so on, oldest first."""
        return self.generate([self.tokenizer.chat(messages)], params)[0]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[Delta]:
        """Completes one prompt piece by piece. Closing the iterator, or an interrupt, aborts it and frees its pages."""
        return self._stream(self._request(prompt, params or SamplingParams()))

    def stream_chat(self, messages: Sequence[Message], params: SamplingParams | None = None) -> Iterator[Delta]:
        """Answers a conversation piece by piece, as `stream` does."""
        return self.stream(self.tokenizer.chat(messages), params)

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return self.engine.request(self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt, params)

    def _run(self, requests: Sequence[Request]) -> list[RequestOutput]:
        try:
            for request in requests:
                self.engine.add(request)
            while any(request.finish_reason is None for request in requests):
                self.engine.step()
        finally:
            for request in requests:
                self.engine.abort(request)
        return [request.output() for request in requests]

    def _stream(self, request: Request) -> Iterator[Delta]:
        try:
            self.engine.add(request)
            while request.finish_reason is None:
                self.engine.step()
                if request.finish_reason is None and (text := request.news()):
                    yield Delta(text)
            yield Delta(request.news(), request.output())
        finally:
            self.engine.abort(request)
