"""`cpu`: a fused function for few tokens; weights are decoded in registers as they stream from memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import get_args

import torch
from torch import Tensor

from muster.contract import Decline
from muster.device import Device
from muster.moe.backend import Facts, FusedFunc, Routed
from muster.moe.kernels.cpu import Shape, experts_kernel
from muster.moe.problem import ActivationName, MoEProblem
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights
from muster.native import REQUIREMENT, rows, team
from muster.native.jit import Kernel, host
from muster.workspace import Workspace

MAX_TOKENS = 512
"""From here on decoding to float32 once and torch's product win (measured on two Zen 4 cores)."""


@dataclass(frozen=True, eq=False)
class CpuExperts:
    """The kernel of this layer's shape, and where it finds the weights."""

    kernel: Kernel
    shape: Shape
    gate_up: rows.RowData
    down: rows.RowData
    gate_up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes made beyond the stored weights: total scales, and whatever was not contiguous."""
        return self.gate_up.nbytes + self.down.nbytes

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Of all the weights, in the kernel's order."""
        biases = (0 if bias is None else bias.data_ptr() for bias in (self.gate_up_bias, self.down_bias))
        return (*self.gate_up.addresses, *self.down.addresses, *biases)


@register_fused_func("cpu")
class CpuFused(FusedFunc[CpuExperts]):
    """One parallel region per layer; both sides float32, nothing is rounded but sums."""

    facts = Facts(
        devices=frozenset({"cpu"}),
        weights=rows.FAMILIES,
        dtypes=frozenset({"f32"}),
        activations=frozenset(get_args(ActivationName)),
        bias=True,
        clamp=True,
        router_weight_on_input=True,
        zero_tokens=True,
        sentinel_ids=True,
        graph_safe=False,
        deterministic=True,
        hidden_multiple=rows.BLOCK,
        inner_multiple=rows.BLOCK,
        max_tokens=MAX_TOKENS,
        packages=(REQUIREMENT,),
        kernels=("experts",),
    )

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        facts = self.facts.decline(problem, device)
        reasons = dict.fromkeys(facts.reasons if facts else (), True)
        why_not = rows.why_not(problem.weights)
        return Decline.when(reasons | ({why_not: True} if why_not else {}))

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> CpuExperts:
        gate_up, down = rows.RowData.of(weights.gate_up), rows.RowData.of(weights.down)
        shape = Shape(
            gate_up=rows.Rows.of(weights.gate_up, gate_up),
            down=rows.Rows.of(weights.down, down),
            experts=problem.local_experts,
            first_expert=problem.first_expert,
            top_k=problem.routing.top_k,
            activation=problem.activation,
            bias=problem.bias,
            weight_on_input=problem.router_weight_on_input,
        )
        biases = (_float(weights.gate_up_bias), _float(weights.down_bias))
        return CpuExperts(experts_kernel(shape, host()), shape, gate_up, down, *biases)

    def run(self, prepared: CpuExperts, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        tokens, threads = len(x_TD), torch.get_num_threads()
        fixed, each = prepared.shape.own_bytes
        shared, own = tokens * prepared.shape.inner_bytes, fixed + tokens * each
        scratch = workspace.take("cpu experts", (shared + own * threads,), torch.uint8).data_ptr()
        inputs = (x_TD.data_ptr(), routed.ids_TK.data_ptr(), routed.weights_TK.data_ptr(), out_TD.data_ptr())
        arguments = (tokens, *inputs, scratch, scratch + shared, own, *prepared.addresses)
        team.team().run(prepared.kernel, arguments)


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.float().contiguous()
