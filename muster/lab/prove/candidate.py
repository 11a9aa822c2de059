"""A backend bound to a part's weights: whatever kind it is, tokens go in and the caller's output is filled."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muster.gemm.backend import AnyLinear, LinearFacts
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab.prove.cases import ExpertInputs, Inputs, LinearInputs, Part
from muster.moe.backend import Facts
from muster.moe.experts import bind
from muster.moe.problem import MoEProblem
from muster.moe.registry import backends
from muster.workspace import Workspace


@dataclass(frozen=True, eq=False)
class Candidate:
    """One backend with its own layout of one part's weights, and tokens to run on.

    Attributes:
        inputs: the weights it is bound to, and the tokens.
        facts: what the backend declares.
        layout_bytes: what its layout keeps beyond the stored weights.
        width: columns of the output.
    """

    inputs: Inputs
    facts: Facts | LinearFacts
    layout_bytes: int
    width: int
    _call: Callable[[Inputs, Tensor, Workspace], None]

    @staticmethod
    def bind(part: Part, backend: str, inputs: Inputs) -> Candidate:
        """Prepares the weights of `inputs` for the backend of that name.

        Raises:
            UsageError: no such backend.
        """
        if isinstance(inputs, LinearInputs):
            assert isinstance(part.problem, LinearProblem)
            return _bind_linear(part.problem, backend, inputs)
        assert isinstance(part.problem, MoEProblem)
        return _bind_experts(part.problem, backend, inputs)

    def on(self, inputs: Inputs) -> Candidate:
        """The same backend and layout on other tokens; the weights of `inputs` must be equal and are not kept."""
        if isinstance(self.inputs, LinearInputs):
            assert isinstance(inputs, LinearInputs)
            return replace(self, inputs=replace(self.inputs, x_TK=inputs.x_TK))
        assert isinstance(inputs, ExpertInputs)
        return replace(self, inputs=replace(self.inputs, x_TD=inputs.x_TD, routed=inputs.routed))

    def run(self, out: Tensor, workspace: Workspace) -> None:
        """Writes all of `out`, `[T, width]` in the dtype of the tokens."""
        self._call(self.inputs, out, workspace)

    @property
    def tokens(self) -> Tensor:
        """The tokens, `[T, columns]`."""
        return self.inputs.x_TK if isinstance(self.inputs, LinearInputs) else self.inputs.x_TD

    @property
    def graph_safe(self) -> bool:
        """Whether the backend declares that a graph may capture its `run`; linears have no such fact."""
        return isinstance(self.facts, Facts) and self.facts.graph_safe

    def out_like(self, tokens: int) -> Tensor:
        """An output for that many tokens, filled with NaN."""
        return self.tokens.new_full((tokens, self.width), torch.nan)


def tensors(inputs: Inputs) -> Mapping[str, Tensor]:
    """Every tensor of the inputs by name."""
    if isinstance(inputs, LinearInputs):
        named: dict[str, Tensor | None] = {**inputs.matrix.tensors, "bias": inputs.bias, "x": inputs.x_TK}
    else:
        named = {
            **{f"gate_up.{name}": tensor for name, tensor in inputs.weights.gate_up.tensors.items()},
            **{f"down.{name}": tensor for name, tensor in inputs.weights.down.tensors.items()},
            "gate_up_bias": inputs.weights.gate_up_bias,
            "down_bias": inputs.weights.down_bias,
            "x": inputs.x_TD,
            "ids": inputs.routed.ids_TK,
            "routing weights": inputs.routed.weights_TK,
        }
    return {name: tensor for name, tensor in named.items() if tensor is not None}


def _bind_experts(problem: MoEProblem, backend: str, inputs: ExpertInputs) -> Candidate:
    experts = bind(backend, problem, inputs.weights)

    def call(given: Inputs, out: Tensor, workspace: Workspace) -> None:
        assert isinstance(given, ExpertInputs)
        experts.run(given.x_TD, given.routed, out, workspace)

    return Candidate(inputs, backends().get(backend).facts, experts.prepared.nbytes, problem.hidden, call)


def _bind_linear(problem: LinearProblem, backend: str, inputs: LinearInputs) -> Candidate:
    linear: AnyLinear = linears().get(backend)
    prepared = linear.prepare(problem, inputs.matrix, inputs.bias)

    def call(given: Inputs, out: Tensor, workspace: Workspace) -> None:
        assert isinstance(given, LinearInputs)
        linear.run(prepared, given.x_TK, out, workspace)

    return Candidate(inputs, linear.facts, prepared.nbytes, problem.rows, call)
