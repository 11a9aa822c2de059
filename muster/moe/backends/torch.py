"""The `torch` runner core: any format, any activation, on every device, in float32 matrix products.

It decodes the two matrices of each expert that has rows, and of no other, right before it multiplies by them: slow for
a few rows, close to a dense product for many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from torch import Tensor
from torch.nn import functional

from muster.formats.codec import decode
from muster.formats.matrix import QuantMatrix
from muster.formats.spec import FORMATS
from muster.moe.backend import ExpertRows, Facts, RowLayout, RunnerCore
from muster.moe.problem import Activation, ActivationName, MoEProblem
from muster.moe.registry import register_runner_core
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace


@dataclass(frozen=True, eq=False)
class TorchExperts:
    """The canonical weights, as they came."""

    activation: Activation
    weights: ExpertWeights
    nbytes: int = 0


@register_runner_core("torch")
class TorchCore(RunnerCore[TorchExperts]):
    """One expert after the other."""

    facts = Facts(
        devices=frozenset({"cpu", "8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1"}),
        weights=frozenset(entry.family for entry in FORMATS.values()),
        act_order=True,
        dtypes=frozenset({"bf16", "f16", "f32"}),
        activations=frozenset(get_args(ActivationName)),
        bias=True,
        clamp=True,
        router_weight_on_input=True,
        zero_tokens=True,
        sentinel_ids=True,
        graph_safe=False,
        deterministic=True,
    )
    layouts = frozenset(RowLayout)

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> TorchExperts:
        return TorchExperts(problem.activation, weights)

    def run(self, prepared: TorchExperts, rows: ExpertRows, out_RD: Tensor, workspace: Workspace) -> None:
        weights = prepared.weights
        for local, (start, count) in enumerate(zip(rows.starts_L.tolist(), rows.counts_L.tolist(), strict=True)):
            if not count:
                continue
            real = slice(start, start + count)
            hidden = _linear(rows.x_RD[real].float(), weights.gate_up, weights.gate_up_bias, local)
            inner = _activate(prepared.activation, hidden)
            out_RD[real] = _linear(inner, weights.down, weights.down_bias, local)


def _linear(x: Tensor, matrix: QuantMatrix, bias_LN: Tensor | None, local: int) -> Tensor:
    return functional.linear(x, decode(matrix[local]), None if bias_LN is None else bias_LN[local].float())


def _activate(activation: Activation, hidden: Tensor) -> Tensor:
    """In place where it can: prefill spends its time here next to the products."""
    if activation.name == "relu2":
        return hidden.relu_().square_()
    gate, up = hidden.chunk(2, dim=-1)
    if activation.limit is not None:
        gate, up = gate.clamp_(max=activation.limit), up.clamp_(-activation.limit, activation.limit)
    if activation.name == "silu":
        return functional.silu(gate).mul_(up)
    if activation.name == "gelu":
        return functional.gelu(gate, approximate="tanh").mul_(up)
    return gate.mul(activation.alpha).sigmoid_().mul_(gate).mul_(up.add_(1.0))
