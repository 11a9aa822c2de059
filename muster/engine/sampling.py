"""From logits to tokens, one row per request, each as if it were alone.

The order of operations: penalties (repetition, then presence and frequency), bias, grammar, temperature, top-k, top-p,
min-p, draw.
"Best" always means the larger logit and, among equals, the lower id. Log-probabilities are those of the model's own
distribution, before any of these.

Randomness is a function of the request's seed and the position of the token, so that neither the other requests in
the batch nor a preemption changes what is drawn.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from muster.engine.request import Request, SamplingParams, TokenLogprob
from muster.errors import NumericsError, RequestError

_NUCLEUS_GUESS = 256


@dataclass(frozen=True)
class Sampled:
    """The chosen token, and its log-probabilities if the request asked for them."""

    token_id: int
    logprob: TokenLogprob | None


def sample(logits_RV: Tensor, requests: Sequence[Request]) -> list[Sampled | NumericsError | RequestError]:
    """The next token of each request; an error for one whose logits hold NaN, +inf, or nothing but -inf.

    A request whose grammar leaves no token gets an error too: of the request, not of the numbers.

    Args:
        logits_RV: float32 `[R, V]`.
        requests: R requests, whose `tokens` are all those before the new one.
    """
    if not requests:
        return []
    # argmax takes NaN for the largest value, so one reduction finds both the greedy token and every bad row.
    greedy_R = logits_RV.argmax(dim=-1)
    finite_R = logits_RV.gather(-1, greedy_R[:, None]).isfinite().flatten().tolist()
    rows = zip(requests, logits_RV, greedy_R.tolist(), finite_R, strict=True)
    return [
        _sample_row(request, logits_V, greedy) if finite else _numerics_error(request, logits_V)
        for request, logits_V, greedy, finite in rows
    ]


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), one of 2^53 equally likely, that depends on nothing but `seed` and `position`."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + position.to_bytes(8, "little"), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def penalise(logits_V: Tensor, tokens: Sequence[int], prompt_length: int, params: SamplingParams) -> Tensor:
    """The logits in float64 after repetition, presence and frequency penalties; `tokens` is prompt and answer."""
    logits_V = logits_V.double()
    seen = torch.tensor(tokens, dtype=torch.int64, device=logits_V.device)
    value = logits_V[seen]
    logits_V[seen] = torch.where(value > 0, value / params.repetition_penalty, value * params.repetition_penalty)
    answer, counts = np.unique(tokens[prompt_length:], return_counts=True)
    if len(answer):
        lowered = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(logits_V)
        logits_V[torch.from_numpy(answer).to(logits_V.device)] -= lowered
    return logits_V


def add_bias(logits_V: Tensor, bias: Sequence[tuple[int, float]]) -> Tensor:
    """The logits in float64 with a number added to some of them."""
    ids, numbers = zip(*bias, strict=True)
    return logits_V.double().index_add_(
        0, torch.tensor(ids, device=logits_V.device), torch.tensor(numbers, dtype=torch.float64, device=logits_V.device)
    )


def best(logits_V: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, largest first, lowest id first among equals."""
    if count >= len(logits_V):
        return logits_V.argsort(descending=True, stable=True)
    # topk breaks ties as it likes: its last value, not its ids, says who may be among the best.
    least = logits_V.topk(count).values[-1]
    ids = (logits_V >= least).nonzero().flatten()
    return ids[logits_V[ids].argsort(descending=True, stable=True)][:count]


def draw(logits_V: Tensor, params: SamplingParams, number: float) -> int:
    """The token that `number` in [0, 1) picks from what temperature (above 0), top-k, top-p and min-p leave."""
    ids = _kept_ids(logits_V, params)
    weights = _weights(logits_V if ids is None else logits_V[ids], logits_V.max(), params.temperature)
    if params.min_p > 0:
        weights = torch.where(weights >= params.min_p, weights, 0.0)
    sums = weights.cumsum(0)
    # The first running sum above number * total belongs to a token of positive weight.
    index = int(torch.searchsorted(sums, number * sums[-1], right=True))
    return index if ids is None else int(ids[index])


def _sample_row(request: Request, logits_V: Tensor, greedy: int) -> Sampled | RequestError:
    params = request.params
    adjusted_V = logits_V
    if params.penalised:
        adjusted_V = penalise(logits_V, request.tokens, len(request.prompt), params)
    if params.logit_bias:
        adjusted_V = add_bias(adjusted_V, params.logit_bias)
    if request.matcher is not None:
        adjusted_V = request.matcher.mask(adjusted_V)
        if float(adjusted_V.amax()) == -math.inf:
            return RequestError("grammar", found="no token that may come next", expected="one the tokenizer can write")
    if not params.greedy:
        token_id = draw(adjusted_V, params, uniform(request.seed, len(request.tokens)))
    else:
        token_id = greedy if adjusted_V is logits_V else int(adjusted_V.argmax())
    return Sampled(token_id, _logprob(logits_V, token_id, params.logprobs))


def _weights(logits: Tensor, largest: Tensor, temperature: float) -> Tensor:
    """Probabilities times a common factor, float64; 1 for the largest logit."""
    return logits.double().sub_(largest.double()).div_(temperature).exp_()


def _kept_ids(logits_V: Tensor, params: SamplingParams) -> Tensor | None:
    """Ids that top-k and then top-p keep, best first; None for all of them in their own order."""
    ids = best(logits_V, params.top_k) if params.top_k else None
    if params.top_p >= 1.0:
        return ids
    largest = logits_V.max()
    mass = params.top_p * _weights(logits_V if ids is None else logits_V[ids], largest, params.temperature).sum()
    limit = len(logits_V) if ids is None else len(ids)
    count = min(limit, _NUCLEUS_GUESS)
    while True:
        head = best(logits_V, count) if ids is None else ids[:count]
        sums = _weights(logits_V[head], largest, params.temperature).cumsum(0)
        if count == limit or sums[-1] >= mass:
            return head[: int((sums < mass).sum()) + 1]
        count = min(limit, count * 16)


def _logprob(logits_V: Tensor, token_id: int, count: int | None) -> TokenLogprob | None:
    if count is None:
        return None
    logprobs_V = torch.log_softmax(logits_V.double(), dim=-1)
    ids = best(logits_V, count) if count else logits_V.new_empty(0, dtype=torch.int64)
    pairs = zip(ids.tolist(), logprobs_V[ids].tolist(), strict=True)
    return TokenLogprob(token_id, float(logprobs_V[token_id]), tuple(pairs))


def _numerics_error(request: Request, logits_V: Tensor) -> NumericsError:
    counts = {
        "NaN": int(logits_V.isnan().sum()),
        "+inf": int((logits_V == torch.inf).sum()),
        "-inf": int((logits_V == -torch.inf).sum()),
    }
    found = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    return NumericsError(
        f"logits of token {len(request.tokens)} of a request",
        found=f"{found} of {len(logits_V)}",
        expected="finite numbers",
        hint="a weight or a scale of the checkpoint is damaged, or a backend is wrong: try moe_backend='torch'",
    )
