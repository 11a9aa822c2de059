"""The expert layer in plain loops and float64: the oracle that judges every backend."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from muster.formats.codec import decode
from muster.formats.matrix import QuantMatrix
from muster.formats.rounding import EXACT, Grid, Rounding, activation_scale, round_to, round_weights
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem
from muster.moe.routing import route
from muster.moe.weights import ExpertWeights, Gate


def moe_layer(
    problem: MoEProblem, gate: Gate, weights: ExpertWeights, x_TD: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Router and experts: `[T, D]` in `dtype`. A shared expert is the caller's to add."""
    routed = route(gate_logits(gate, x_TD, dtype), problem.routing, gate.selection_bias_E)
    return expert_layer(problem, weights, x_TD, routed, dtype)


def gate_logits(gate: Gate, x_TD: Tensor, dtype: torch.dtype = torch.float64) -> Tensor:
    """Router logits `[T, E]`."""
    bias_E = None if gate.bias_E is None else gate.bias_E.to(dtype)
    return functional.linear(x_TD.to(dtype), gate.weight_ED.to(dtype), bias_E)


def expert_layer(
    problem: MoEProblem,
    weights: ExpertWeights,
    x_TD: Tensor,
    routed: Routed,
    dtype: torch.dtype = torch.float64,
    rounding: Rounding = EXACT,
) -> Tensor:
    """The weighted sum of each token's experts on this rank: `[T, D]` in `dtype`, zeros where it has none.

    With a `rounding` it is the sum as a kernel with those rounding points computes it; the output is not rounded.
    """
    out_TD = torch.zeros(x_TD.shape, dtype=dtype, device=x_TD.device)
    for local in range(problem.local_experts):
        tokens, slots = (routed.ids_TK == problem.first_expert + local).nonzero(as_tuple=True)
        if not tokens.numel():
            continue
        x = x_TD[tokens].to(dtype)
        weight = routed.weights_TK[tokens, slots, None].to(dtype)
        if problem.router_weight_on_input:
            y = _expert(problem.activation, weights, local, x * weight, rounding)
        else:
            y = _expert(problem.activation, weights, local, x, rounding) * weight
        out_TD.index_add_(0, tokens, round_to(y, rounding.weighted))
    return out_TD


def shared_expert(
    activation: Activation,
    gate_up: QuantMatrix,
    down: QuantMatrix,
    x_TD: Tensor,
    gate_D: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """An expert that every token visits, times sigmoid(x . gate_D) where it has that gate (Qwen3.5): `[T, D]`."""
    x_TD = x_TD.to(dtype)
    y_TD = activate(activation, x_TD @ decode(gate_up, dtype).T) @ decode(down, dtype).T
    return y_TD if gate_D is None else y_TD * (x_TD @ gate_D.to(dtype)).sigmoid()[:, None]


def activate(activation: Activation, gate_up: Tensor) -> Tensor:
    """The function between the GEMMs: `[..., 2F]` (gate then up) to `[..., F]`, or `[..., F]` when not gated."""
    if activation.name == "relu2":
        return gate_up.relu().square()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.limit is not None:
        gate = gate.clamp(max=activation.limit)
        up = up.clamp(-activation.limit, activation.limit)
    if activation.name == "silu":
        return gate * gate.sigmoid() * up
    if activation.name == "gelu":
        return functional.gelu(gate, approximate="tanh") * up
    return gate * (activation.alpha * gate).sigmoid() * (up + 1)


def _expert(activation: Activation, weights: ExpertWeights, local: int, x: Tensor, rounding: Rounding) -> Tensor:
    grid = rounding.weights if rounding.first_weights is Grid.NONE else rounding.first_weights
    product = _linear(x, weights.gate_up[local], weights.gate_up_bias, local, rounding.input, grid)
    inner = activate(activation, round_to(product, rounding.product))
    rows = _linear(inner, weights.down[local], weights.down_bias, local, rounding.inner, rounding.weights)
    return round_to(rows, rounding.rows)


def _linear(x: Tensor, matrix: QuantMatrix, bias_LN: Tensor | None, local: int, inputs: Grid, weights: Grid) -> Tensor:
    y = round_to(x, inputs, activation_scale(matrix)) @ round_weights(matrix, weights).to(x.dtype).T
    return y if bias_LN is None else y + bias_LN[local].to(x.dtype)
