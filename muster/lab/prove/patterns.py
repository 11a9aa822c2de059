"""How a case's tokens are routed and what they hold, by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import cycle
from types import MappingProxyType

import torch
from torch import Tensor

from muster.moe.problem import MoEProblem

Choose = Callable[[int, MoEProblem, torch.Generator], Tensor]
"""Expert ids, int64 `[T, K]`, for T tokens."""

TILE_EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)
"""Rows of one expert on and around the sizes that kernels tile by."""

SENTINELS = (-1, -(2**31), 2**31 - 1)
"""Ids that are no expert anywhere; the number of experts is another."""


def any_problem(_: MoEProblem) -> bool:
    """Whatever the problem."""
    return True


def has_choice(problem: MoEProblem) -> bool:
    """Not every token visits every expert."""
    return problem.routing.top_k < problem.experts


def has_half(problem: MoEProblem) -> bool:
    """Half of the experts are enough, and leave two to be idle."""
    return problem.routing.top_k <= problem.experts // 2 <= problem.experts - 2


@dataclass(frozen=True)
class Pattern:
    """A way of routing.

    Attributes:
        choose: the ids.
        least: tokens from which on it differs from the others.
        fits: whether it differs from the others for a problem.
        sentinels: some ids are computed nowhere, on any rank.
        blank: a third of the tokens are all zeros, as padding is.
    """

    choose: Choose
    least: int = 1
    fits: Callable[[MoEProblem], bool] = any_problem
    sentinels: bool = False
    blank: bool = False

    def makes_sense(self, tokens: int, problem: MoEProblem) -> bool:
        """Whether it shows something there that the others do not."""
        return tokens >= self.least and self.fits(problem)


def uniform(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """K distinct experts per token, every expert as likely as the next."""
    return _likeliest(torch.zeros(problem.experts), tokens, problem, generator)


def skewed(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """The expert of rank r is chosen in proportion to 1/r^1.2, whoever has that rank."""
    ranks = torch.randperm(problem.experts, generator=generator) + 1
    return _likeliest(-1.2 * ranks.float().log(), tokens, problem, generator)


def same(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Every token on the same experts; all others have none."""
    return uniform(1, problem, generator).expand(tokens, -1).contiguous()


def half(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Half of the experts have no token, the first and the last among them."""
    logits = torch.full((problem.experts,), -torch.inf)
    chosen = torch.randperm(problem.experts - 2, generator=generator)[: problem.experts // 2] + 1
    logits[chosen] = 0.0
    return _likeliest(logits, tokens, problem, generator)


def edges(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Row counts on and around the sizes that kernels tile by, as many as T * K slots allow.

    The slots of one expert lie one behind the other around the tokens, so that none gets an expert twice.
    """
    slots = tokens * problem.routing.top_k
    counts: list[int] = []
    for left, edge in zip(range(problem.experts - 1, -1, -1), cycle(TILE_EDGES), strict=False):
        at_least = slots - sum(counts) - left * tokens
        counts.append(min(max(edge, at_least), slots - sum(counts), tokens))
    experts = torch.randperm(problem.experts, generator=generator)
    ids_KT = experts.repeat_interleave(torch.tensor(counts)).view(problem.routing.top_k, tokens)
    return ids_KT.T[torch.randperm(tokens, generator=generator)].contiguous()


def sentinels(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """A third of the slots are computed nowhere, in every spelling: all of the first token's, none of the last's."""
    real = ids = uniform(tokens, problem, generator)
    spellings = torch.tensor([problem.experts, *SENTINELS])
    spelling = spellings[torch.randint(len(spellings), ids.shape, generator=generator)]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 1 / 3, spelling, ids)
    ids[0], ids[-1] = spelling[0], real[-1]
    return ids


def elsewhere(tokens: int, problem: MoEProblem, _: torch.Generator) -> Tensor:
    """Every slot is a sentinel."""
    return torch.full((tokens, problem.routing.top_k), -1)


def _likeliest(logits_E: Tensor, tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """K experts per token, drawn without replacement in proportion to exp(logit)."""
    uniform_TE = torch.rand(tokens, problem.experts, generator=generator).clamp_min_(1e-30)
    return (
        (logits_E - uniform_TE.log().neg().log()).argsort(-1, descending=True)[:, : problem.routing.top_k].contiguous()
    )


PATTERNS: Mapping[str, Pattern] = MappingProxyType(
    {
        "uniform": Pattern(uniform, least=0),
        "skewed": Pattern(skewed, least=2, fits=has_choice),
        "same": Pattern(same, least=2, fits=has_choice),
        "half": Pattern(half, fits=has_half),
        "edges": Pattern(edges, least=16, fits=has_choice),
        "sentinels": Pattern(sentinels, least=2, sentinels=True),
        "elsewhere": Pattern(elsewhere, sentinels=True),
        "blank": Pattern(uniform, least=2, blank=True),
    }
)
"""How tokens are routed, by name."""
