"""A toy runner core: weights decoded once, then one batched product over all experts."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from muster.formats.codec import decode
from muster.moe.backend import ExpertRows, Facts, RowLayout, RunnerCore
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_runner_core
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace


@dataclass(frozen=True, eq=False)
class ToyWeights:
    """gate_up `[L, D, 2F]` and down `[L, F, D]` in float32: transposed, ready for `bmm`."""

    gate_up: Tensor
    down: Tensor

    @property
    def nbytes(self) -> int:
        """Both are copies."""
        return self.gate_up.nbytes + self.down.nbytes


@register_runner_core("toy")
class Toy(RunnerCore[ToyWeights]):
    """Every expert gets as many rows as the busiest one."""

    facts = Facts(
        devices=frozenset({"cpu"}),
        weights=frozenset({"bf16", "nvfp4"}),
        dtypes=frozenset({"f32"}),
        activations=frozenset({"silu"}),
        router_weight_on_input=True,
        zero_tokens=True,
        sentinel_ids=True,
        deterministic=True,
    )
    layouts = frozenset({RowLayout.MASKED})

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> ToyWeights:
        """The layout that `run` reads."""
        return ToyWeights(decode(weights.gate_up).mT.contiguous(), decode(weights.down).mT.contiguous())

    def run(self, prepared: ToyWeights, rows: ExpertRows, out_RD: Tensor, workspace: Workspace) -> None:
        """Rows between an expert's last real one and the next expert are zeros and cost nothing but time."""
        experts, hidden, inner = len(rows.counts_L), rows.x_RD.shape[1], prepared.down.shape[1]
        x = rows.x_RD.view(experts, -1, hidden)
        gate_up = workspace.take("toy gate_up", (experts, x.shape[1], 2 * inner), torch.float32)
        torch.bmm(x, prepared.gate_up, out=gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        torch.bmm(functional.silu(gate) * up, prepared.down, out=out_RD.view(x.shape))
