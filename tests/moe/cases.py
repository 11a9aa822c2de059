"""The named cases every expert-layer backend runs: what to compute, on which tokens, routed how."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from muster.formats.codec import encode
from muster.formats.int4 import SYMMETRIC_ZERO
from muster.formats.matrix import Meaning, QuantMatrix
from muster.formats.spec import (
    BF16,
    F32,
    FORMATS,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Element,
    Format,
    int4,
)
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.weights import ExpertWeights

Pattern = Callable[[int, MoEProblem, torch.Generator], Tensor]
"""Expert ids `[T, K]` for T tokens."""

TILE_EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65)


def uniform(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """K distinct experts per token, every expert as likely as the next."""
    return torch.rand(tokens, problem.experts, generator=generator).argsort(-1)[:, : problem.routing.top_k].contiguous()


def same(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Every token on the same experts; all others have none."""
    return uniform(1, problem, generator).expand(tokens, -1).contiguous()


def last_half(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """No token on the first half of the experts."""
    half = replace(problem, experts=problem.experts // 2)
    return uniform(tokens, half, generator) + problem.experts - half.experts


def tile_edges(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Row counts on and around the sizes kernels tile by, in shuffled order, K = 1."""
    ids = torch.arange(len(TILE_EDGES)).repeat_interleave(torch.tensor(TILE_EDGES))
    return ids[torch.randperm(len(ids), generator=generator)][:tokens, None].contiguous()


def sentinels(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """A third of the slots are computed nowhere, in every spelling; token 0 has nothing but sentinels."""
    ids = uniform(tokens, problem, generator)
    spelling = torch.tensor([-1, problem.experts, -(2**31), 2**31 - 1])
    spelling = spelling[torch.randint(4, ids.shape, generator=generator)]
    ids = torch.where(torch.rand(ids.shape, generator=generator) < 1 / 3, spelling, ids)
    ids[0] = spelling[0]
    return ids


def nothing_here(tokens: int, problem: MoEProblem, generator: torch.Generator) -> Tensor:
    """Every slot is a sentinel."""
    return torch.full((tokens, problem.routing.top_k), -1)


@dataclass(frozen=True)
class Case:
    """A problem, a token count, a routing pattern and a seed.

    Attributes:
        problem: what to compute.
        tokens: T; a backend meant for fewer gets as many as it is meant for.
        pattern: the routing.
        divides: NVFP4's tensor scale divides (compressed-tensors).
        symmetric: int4 without zero points, its scales in bf16 (compressed-tensors).
        seed: of weights, tokens and routing.
    """

    problem: MoEProblem
    tokens: int = 9
    pattern: Pattern = uniform
    divides: bool = False
    symmetric: bool = False
    seed: int = 0


def problem(
    hidden: int = 128,
    inner: int = 256,
    experts: int = 8,
    top_k: int = 2,
    local: tuple[int, int] | None = None,
    weights: Format = BF16,
    act_order: bool = False,
    activation: Activation | None = None,
    bias: bool = False,
    on_input: bool = False,
    dtype: Literal["bf16", "f16", "f32"] = "f32",
) -> MoEProblem:
    """A problem of a size that every backend's alignment allows, unless told otherwise."""
    first, count = local or (0, experts)
    return MoEProblem(
        hidden,
        inner,
        experts,
        RoutingRule(top_k),
        count,
        first,
        weights,
        act_order,
        dtype=dtype,
        activation=activation or Activation(),
        bias=bias,
        router_weight_on_input=on_input,
    )


DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
GPT_OSS = Activation("swiglu-oai", limit=1.0)
CASES: Mapping[str, Case] = {
    **{f"format {name}": Case(problem(weights=format)) for name, format in FORMATS.items()},
    "activations bf16": Case(problem(dtype="bf16")),
    "activations f16": Case(problem(weights=NVFP4, dtype="f16")),
    "nvfp4, tensor scale divides": Case(problem(weights=NVFP4), divides=True),
    "int4, symmetric": Case(problem(weights=int4(32)), symmetric=True),
    "int4, act-order": Case(problem(weights=int4(32), act_order=True)),
    "fp8-block, partial edge blocks": Case(problem(hidden=200, inner=136, weights=FP8_BLOCK)),
    "gelu": Case(problem(activation=Activation("gelu"))),
    "relu2": Case(problem(activation=Activation("relu2"))),
    "relu2, nvfp4": Case(problem(weights=NVFP4, activation=Activation("relu2"))),
    "swiglu-oai without limit": Case(problem(activation=Activation("swiglu-oai"))),
    "gpt-oss: swiglu-oai, limit, bias, mxfp4": Case(problem(weights=MXFP4, activation=GPT_OSS, bias=True)),
    "silu, limit": Case(problem(activation=Activation("silu", limit=0.5))),
    "gelu, limit, nvfp4": Case(problem(weights=NVFP4, activation=Activation("gelu", limit=0.5))),
    "bias": Case(problem(bias=True)),
    "bias, nvfp4": Case(problem(weights=NVFP4, bias=True)),
    "bias, relu2": Case(problem(activation=Activation("relu2"), bias=True)),
    "router weight on input": Case(problem(on_input=True)),
    "router weight on input, bias, nvfp4": Case(problem(weights=NVFP4, bias=True, on_input=True)),
    "zero tokens": Case(problem(), tokens=0),
    "one token": Case(problem(weights=NVFP4), tokens=1),
    "two tokens": Case(problem(weights=NVFP4), tokens=2),
    "seventeen tokens": Case(problem(weights=NVFP4), tokens=17),
    "tile edges": Case(problem(experts=10, top_k=1), tokens=sum(TILE_EDGES), pattern=tile_edges),
    "tile edges, nvfp4": Case(
        problem(experts=10, top_k=1, weights=NVFP4), tokens=sum(TILE_EDGES), pattern=tile_edges, seed=1
    ),
    "all on the same experts": Case(problem(weights=NVFP4), tokens=33, pattern=same),
    "half of the experts have none": Case(problem(weights=NVFP4), tokens=33, pattern=last_half),
    "every expert active": Case(problem(top_k=8, weights=NVFP4)),
    "every expert active, one token": Case(problem(top_k=8, weights=NVFP4), tokens=1),
    "one expert": Case(problem(experts=1, top_k=1), tokens=5),
    "sentinel ids": Case(problem(), tokens=24, pattern=sentinels),
    "sentinel ids, nvfp4": Case(problem(weights=NVFP4), tokens=24, pattern=sentinels),
    "nothing but sentinel ids": Case(problem(weights=NVFP4), tokens=3, pattern=nothing_here),
    "second of three ranks": Case(problem(local=(3, 2), weights=NVFP4), tokens=24),
    "last rank, bf16": Case(problem(local=(6, 2)), tokens=24),
    "odd shape, bf16": Case(problem(hidden=37, inner=23, experts=5, top_k=3)),
    "odd shape, f32": Case(problem(hidden=41, inner=1, experts=3, top_k=2, weights=F32)),
    "odd shape, nvfp4": Case(problem(hidden=48, inner=80, experts=7, top_k=3, weights=NVFP4)),
    "odd shape, mxfp4": Case(problem(hidden=96, inner=32, experts=7, top_k=3, weights=MXFP4)),
    "odd shape, int4-g32": Case(problem(hidden=96, inner=160, experts=7, top_k=3, weights=int4(32))),
    "odd shape, fp8-block": Case(problem(hidden=224, inner=160, experts=7, top_k=3, weights=FP8_BLOCK)),
    "gpt-oss: swiglu-oai, limit, bias, fp8-channel": Case(problem(weights=FP8_CHANNEL, activation=GPT_OSS, bias=True)),
    "relu2, int4-g128": Case(problem(weights=int4(128), activation=Activation("relu2"), bias=True)),
    "relu2, fp8-block": Case(problem(weights=FP8_BLOCK, activation=Activation("relu2"), bias=True)),
    "router weight on input, bias, fp8-block": Case(problem(weights=FP8_BLOCK, bias=True, on_input=True)),
    "tile edges, fp8-channel": Case(
        problem(experts=10, top_k=1, weights=FP8_CHANNEL), tokens=sum(TILE_EDGES), pattern=tile_edges, seed=2
    ),
    "sentinel ids, fp8-block": Case(problem(weights=FP8_BLOCK), tokens=24, pattern=sentinels),
    "nothing but sentinel ids, fp8-block": Case(problem(weights=FP8_BLOCK), tokens=3, pattern=nothing_here),
    "second of three ranks, fp8-channel": Case(problem(local=(3, 2), weights=FP8_CHANNEL), tokens=24),
    "zero tokens, fp8-block": Case(problem(weights=FP8_BLOCK), tokens=0),
    "gelu, fp8-block": Case(problem(weights=FP8_BLOCK, activation=Activation("gelu"))),
    "demo shape": Case(problem(hidden=576, inner=192, top_k=8, weights=NVFP4), tokens=1),
    "many experts": Case(problem(experts=64, top_k=8, weights=NVFP4, hidden=64, inner=64), tokens=11),
}


@dataclass(frozen=True, eq=False)
class Inputs:
    """A case's tensors."""

    weights: ExpertWeights
    x_TD: Tensor
    routed: Routed


def build(case: Case, tokens: int) -> Inputs:
    """The case's tensors for its first `tokens` tokens: the same weights whatever that number."""
    problem, generator = case.problem, torch.Generator().manual_seed(case.seed)
    weights = _weights(case, generator)
    x_TD = torch.randn(case.tokens, problem.hidden, generator=generator)[:tokens].to(DTYPES[problem.dtype])
    ids_TK = case.pattern(case.tokens, problem, generator)[:tokens]
    weights_TK = torch.rand(ids_TK.shape, generator=generator) + 0.1
    return Inputs(weights, x_TD, Routed(ids_TK, weights_TK / weights_TK.sum(-1, keepdim=True) * 2.5))


def _weights(case: Case, generator: torch.Generator) -> ExpertWeights:
    """Gate and up differ in scale by more than an e4m3 step, so that a kernel that mixes up their scales shows."""
    p = case.problem
    spread = (torch.rand(p.local_experts, 1, 1, generator=generator) + 0.5) / p.hidden**0.5
    gate_up = torch.randn(p.local_experts, p.gate_up_rows, p.hidden, generator=generator) * spread
    if p.activation.gated:
        gate_up[:, p.inner :] *= 1.7
    down = torch.randn(p.local_experts, p.hidden, p.inner, generator=generator) / p.inner**0.5
    pieces = 2 if p.activation.gated and (p.weights is NVFP4 or p.weights is FP8_TENSOR) else 1
    return ExpertWeights(
        _encode(case, gate_up, pieces, generator),
        _encode(case, down, 1, generator),
        torch.randn(p.local_experts, p.gate_up_rows, generator=generator) if p.bias else None,
        torch.randn(p.local_experts, p.hidden, generator=generator) if p.bias else None,
    )


def _encode(case: Case, weight: Tensor, pieces: int, generator: torch.Generator) -> QuantMatrix:
    meaning = Meaning.DIVIDES if case.divides else Meaning.MULTIPLIES
    matrix = encode(weight, case.problem.weights, pieces, meaning)
    if case.symmetric:
        assert matrix.scale is not None
        assert matrix.zero is not None
        scale = replace(matrix.scale, value=matrix.scale.value.bfloat16(), element=Element.BF16)
        matrix = replace(matrix, scale=scale, zero=torch.full_like(matrix.zero, SYMMETRIC_ZERO))
    if not case.problem.act_order:
        return matrix
    assert matrix.scale is not None
    groups = torch.arange(weight.shape[-1], dtype=torch.int32) // (weight.shape[-1] // matrix.scale.value.shape[-1])
    order = torch.stack([groups[torch.randperm(len(groups), generator=generator)] for _ in weight])
    return replace(matrix, order=order)
