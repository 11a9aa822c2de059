"""What the endpoints share: the operator's choices, the model, and requests checked before they are queued."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from muster.engine.grammar import Grammar, Kind
from muster.engine.request import Request, SamplingParams
from muster.engine.tokenizer import Tokenizer
from muster.errors import RequestError
from muster.llm import LLM
from muster.server.health import Health
from muster.server.metrics import Metrics
from muster.server.openai_types import CompletionRequest
from muster.server.refusal import RefusalError
from muster.server.worker import Worker, unavailable

_T = TypeVar("_T")

_COMPLETION_TOKENS = 16
"""What OpenAI's older API generates when nothing is said."""


@dataclass(frozen=True)
class Settings:
    """What the operator chose.

    Attributes:
        name: of the model, as clients call it.
        keys: API keys, one of which a client must give; none are needed when empty.
        loopback: only this machine can connect.
        queue: most requests that may wait, besides those in the batch.
        body_bytes: most bytes of a request's body.
        patience: seconds that a client may take no data before it counts as gone.
        reasoning: style of the reasoning; None: as the checkpoint's chat template has it.
        tools: style of the calls; None: as the checkpoint's chat template has it.
    """

    name: str
    keys: tuple[str, ...] = ()
    loopback: bool = True
    queue: int = 256
    body_bytes: int = 4 << 20
    patience: float = 60.0
    reasoning: str | None = None
    tools: str | None = None


class Service:
    """What the endpoints share.

    Attributes:
        settings: what the operator chose.
        worker: runs the engine.
        health: of this server.
        metrics: of this server.
    """

    def __init__(self, settings: Settings, worker: Worker, health: Health, metrics: Metrics) -> None:
        self.settings, self.worker, self.health, self.metrics = settings, worker, health, metrics
        # A long prompt or a large grammar must not hold up the event loop.
        self._aside = ThreadPoolExecutor(1, thread_name_prefix="prompts")

    @property
    def llm(self) -> LLM:
        """The model.

        Raises:
            RefusalError: it is not loaded.
        """
        if self.worker.llm is None:
            raise unavailable(self.health)
        return self.worker.llm

    @property
    def tokenizer(self) -> Tokenizer:
        """The checkpoint's tokenizer.

        Raises:
            RequestError: it has none.
        """
        if not self.llm.has_tokenizer:
            expected = "token ids, to /v1/completions: the checkpoint has no tokenizer"
            raise RequestError("prompt", found="text", expected=expected)
        return self.llm.tokenizer

    async def aside(self, work: Callable[[], _T]) -> _T:
        """Runs what reads long texts, one after the other, beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._aside, work)

    def check_model(self, name: str | None) -> None:
        """Refuses another model's name.

        Raises:
            RefusalError: naming the one that is served.
        """
        if name not in (None, self.settings.name):
            raise RefusalError(404, "model_not_found", "model", found=repr(name), expected=repr(self.settings.name))

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included.

        Raises:
            RequestError: the checkpoint has no tokenizer, or an id is none of its.
        """
        vocab = self.llm.decoder.spec.vocab
        foreign = sorted({token_id for token_id in token_ids if token_id >= vocab})
        if foreign:
            raise RequestError("tokens", found=f"token ids {foreign[:5]}", expected=f"ids from 0 to {vocab - 1}")
        return self.tokenizer.decode(token_ids, skip_special_tokens=False)

    def grammar(self, kind: Kind, text: str) -> Grammar:
        """A grammar for this model's answers.

        Raises:
            RequestError: what is wrong with it.
        """
        return Grammar.compile(kind, text, self.tokenizer, self.llm.decoder.spec.vocab)

    def completion(self, body: CompletionRequest) -> list[Request]:
        """The requests of a completion: n for the first prompt, then n for the next.

        Raises:
            RequestError: everything that is wrong.
        """
        params = body.params(body.max_tokens or _COMPLETION_TOKENS, logprobs=body.logprobs)
        prompts = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt for prompt in _prompts(body)]
        return [request for prompt in prompts for request in self.requests(prompt, params, body.n or 1)]

    def requests(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        count: int,
        grammar: Grammar | None = None,
        keep: frozenset[str] = frozenset(),
    ) -> list[Request]:
        """The same prompt `count` times; of answers with a seed each has the next one.

        Raises:
            RequestError: every reason why it cannot be served.
        """
        seeds = [None if params.seed is None else (params.seed + index) % (1 << 64) for index in range(count)]
        engine = self.llm.engine
        return [engine.request(prompt, replace(params, seed=seed), grammar, keep) for seed in seeds]


def _prompts(body: CompletionRequest) -> list[Any]:
    if isinstance(body.prompt, str) or isinstance(body.prompt[0], int):
        return [body.prompt]
    return list(body.prompt)
