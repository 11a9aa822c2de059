"""Cases: what a backend is proven on. A part of a checkpoint, a token count, a routing pattern and a seed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from muster.contract import Decline
from muster.device import DTYPES, Device
from muster.errors import UsageError
from muster.formats.matrix import QuantMatrix
from muster.formats.rounding import EXACT, Rounding
from muster.formats.spec import FORMATS, Format, int4
from muster.gemm import reference as linear_reference
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab.prove.inputs import (
    ExpertInputs,
    Inputs,
    LinearInputs,
    draw_experts,
    draw_linear,
    draw_tokens,
    read_experts,
    read_linear,
)
from muster.lab.prove.parts import Part, Problem, Role, parts
from muster.lab.prove.patterns import PATTERNS, elsewhere
from muster.moe import reference as expert_reference
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.registry import backends
from muster.moe.weights import ExpertWeights

__all__ = [
    "BUCKETS",
    "Case",
    "ExpertInputs",
    "Inputs",
    "LinearInputs",
    "Part",
    "Role",
    "build",
    "cases",
    "decline",
    "parts",
    "reference",
]

BUCKETS: Mapping[str, tuple[int, ...]] = MappingProxyType(
    {
        "cpu": (1, 2, 4, 8, 16, 64, 128, 512),
        "cuda": (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    }
)
"""Token counts to prove and time unless told otherwise: one request's decode up to a full prefill step."""

QUICK = ("uniform", "skewed", "sentinels", "dense")
"""Patterns of a proof in seconds."""


@dataclass(frozen=True)
class Case:
    """What one proof runs on.

    Attributes:
        part: the problem.
        tokens: T.
        pattern: how tokens are routed, by name (`patterns.PATTERNS`); "dense" or "blank" for a linear.
        seed: of tokens and routing, and of the weights where they are drawn.
        directory: the checkpoint whose weights at `part.module` are used; None: they are drawn.
    """

    part: Part
    tokens: int
    pattern: str
    seed: int
    directory: str | None = None

    def to_json(self) -> str:
        """The case as one line of JSON."""
        fields = asdict(self)
        fields["part"]["problem"]["weights"] = self.part.problem.weights.name
        return json.dumps(fields, sort_keys=True)

    @staticmethod
    def from_json(text: str) -> Case:
        """The case that `to_json` wrote.

        Raises:
            UsageError: something else.
        """
        try:
            fields = json.loads(text)
            part = fields.pop("part")
            role = Role(part.pop("role"))
            return Case(Part(role, _problem(role, part.pop("problem")), **part), **fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UsageError("case", found=f"{text[:80]!r} ({error})", expected="what Case.to_json writes") from error

    @property
    def has_sentinels(self) -> bool:
        """Whether some ids are no expert of this rank."""
        problem = self.part.problem
        elsewhere = isinstance(problem, MoEProblem) and problem.local_experts < problem.experts
        return elsewhere or (isinstance(problem, MoEProblem) and PATTERNS[self.pattern].sentinels)


def cases(
    part: Part,
    tokens: Sequence[int],
    directory: Path | None,
    *,
    quick: bool = False,
    seeds: Sequence[int] = (0,),
) -> tuple[Case, ...]:
    """Every pattern that makes sense for the part, for each token count and seed, and one case without tokens.

    Args:
        part: the problem.
        tokens: the token counts.
        directory: the checkpoint whose weights are used; None: they are drawn.
        quick: only what most often goes wrong, for a proof in seconds.
        seeds: one round of cases for each.
    """
    weights = None if directory is None else str(directory)
    found = [
        Case(part, count, pattern, seed, weights)
        for seed in seeds
        for count in tokens
        for pattern in _patterns(part.problem, count)
        if not quick or pattern in QUICK
    ]
    if isinstance(part.problem, MoEProblem) and not quick:
        found += [Case(part, 0, "uniform", seed, weights) for seed in seeds if 0 not in tokens]
    return tuple(found)


_MANY = 64
"""Tokens from which on a linear has nothing new to show with some of them zero, and a vocabulary of outputs is slow."""


def _patterns(problem: Problem, tokens: int) -> tuple[str, ...]:
    if isinstance(problem, LinearProblem):
        return ("dense", "blank") if 1 < tokens <= _MANY else ("dense",)
    return tuple(name for name, pattern in PATTERNS.items() if pattern.makes_sense(tokens, problem))


def decline(backend: str, case: Case, device: Device) -> Decline | None:
    """Why a backend is not asked to compute a case: what it answers itself, or a trait that it does not declare."""
    if isinstance(case.part.problem, LinearProblem):
        linear = linears().get(backend)
        answer = linear.supports(case.part.problem, device)
        checks = {_too_many(linear.facts.max_tokens): case.tokens > (linear.facts.max_tokens or case.tokens)}
    else:
        experts = backends().get(backend)
        answer = experts.supports(case.part.problem, device)
        checks = {
            _too_many(experts.facts.max_tokens): case.tokens > (experts.facts.max_tokens or case.tokens),
            "needs at least one token": case.tokens == 0 and not experts.facts.zero_tokens,
            "takes no sentinel ids": case.has_sentinels and not experts.facts.sentinel_ids,
        }
    return answer or Decline.when(checks)


def _too_many(bound: int | None) -> str:
    return f"is meant for up to {bound} tokens"


def build(case: Case, device: torch.device) -> Inputs:
    """The case's tensors on `device`, the same in every process.

    Raises:
        CheckpointError, UsageError: the directory does not hold the part's weights.
    """
    problem, generator = case.part.problem, torch.Generator().manual_seed(case.seed)
    if isinstance(problem, LinearProblem):
        matrix, bias = _linear_weights(case.part, case.directory, case.seed, device)
        x_TK = draw_tokens(case.tokens, problem.columns, case.pattern == "blank", generator)
        return LinearInputs(matrix, bias, x_TK.to(device, DTYPES[problem.dtype]))
    weights = _expert_weights(case.part, case.directory, case.seed, device)
    pattern = PATTERNS[case.pattern]
    x_TD = draw_tokens(case.tokens, problem.hidden, pattern.blank, generator)
    ids_TK = pattern.choose(case.tokens, problem, generator)
    if pattern.choose is not elsewhere:
        ids_TK = _with_one_here(ids_TK, problem)
    weights_TK = torch.rand(ids_TK.shape, generator=generator) + 0.5
    share = 1.0 if problem.routing.renormalise else 0.7
    weights_TK *= share * problem.routing.scaling_factor / weights_TK.sum(-1, keepdim=True)
    routed = Routed(ids_TK.to(device), weights_TK.to(device))
    return ExpertInputs(weights, x_TD.to(device, DTYPES[problem.dtype]), routed)


def reference(case: Case, inputs: Inputs, rounding: Rounding = EXACT) -> Tensor:
    """What a kernel with that rounding should answer, in float64, its output not yet rounded; with none, the ideal."""
    if isinstance(inputs, LinearInputs):
        return linear_reference.linear(inputs.matrix, inputs.bias, inputs.x_TK, rounding)
    assert isinstance(case.part.problem, MoEProblem)
    return expert_reference.expert_layer(
        case.part.problem, inputs.weights, inputs.x_TD, inputs.routed, rounding=rounding
    )


def forget() -> None:
    """Gives up the weights that are kept for the next case."""
    _expert_weights.cache_clear()
    _linear_weights.cache_clear()


@lru_cache(maxsize=1)
def _expert_weights(part: Part, directory: str | None, seed: int, device: torch.device) -> ExpertWeights:
    """Kept for the next case of the same part: reading or drawing a layer takes longer than judging a few tokens."""
    assert isinstance(part.problem, MoEProblem)
    if directory is None:
        return _experts_to(draw_experts(part.problem, seed), device)
    return _experts_to(read_experts(part, part.problem, Path(directory)), device)


@lru_cache(maxsize=1)
def _linear_weights(
    part: Part, directory: str | None, seed: int, device: torch.device
) -> tuple[QuantMatrix, Tensor | None]:
    assert isinstance(part.problem, LinearProblem)
    matrix, bias = (
        draw_linear(part.problem, seed) if directory is None else read_linear(part, part.problem, Path(directory))
    )
    return _to(matrix, device), None if bias is None else bias.to(device)


def _with_one_here(ids_TK: Tensor, problem: MoEProblem) -> Tensor:
    """Gives a slot of the last token, never a blank one, to this rank if none is: even few tokens compute something."""
    first, last = problem.first_expert, problem.first_expert + problem.local_experts
    if ids_TK.numel() and not ((ids_TK[-1] >= first) & (ids_TK[-1] < last)).any():
        ids_TK[-1, 0] = first
    return ids_TK


def _experts_to(weights: ExpertWeights, device: torch.device) -> ExpertWeights:
    biases = (None if bias is None else bias.to(device) for bias in (weights.gate_up_bias, weights.down_bias))
    return ExpertWeights(_to(weights.gate_up, device), _to(weights.down, device), *biases)


def _to(matrix: QuantMatrix, device: torch.device) -> QuantMatrix:
    tensors = {name: tensor.to(device) for name, tensor in matrix.tensors.items()}
    return matrix.with_tensors(tensors, matrix.shape)


def _problem(role: Role, fields: dict[str, Any]) -> Problem:
    weights = _format(fields.pop("weights"))
    if role is Role.LINEARS:
        return LinearProblem(weights=weights, **fields)
    routing, activation = RoutingRule(**fields.pop("routing")), Activation(**fields.pop("activation"))
    return MoEProblem(weights=weights, routing=routing, activation=activation, **fields)


def _format(name: str) -> Format:
    group = name.removeprefix("int4-g")
    return int4(int(group)) if name not in FORMATS and group.isdigit() else FORMATS[name]
