"""`triton_fused`: a fused function on GPUs; tokens are grouped by expert through an index, never copied."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from muster.contract import Decline
from muster.device import Device
from muster.moe.backend import FusedFunc, Routed
from muster.moe.backends.triton import KERNELS, also, facts, pairs_decline
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.triton_layer import TritonLayer


@register_fused_func("triton_fused")
class TritonFused(FusedFunc["TritonLayer"]):
    """Group, gate_up with activation, down with routing weight, combine: four launches, five for many slots."""

    facts = facts(kernels=(*KERNELS, "group_kernel", "list_kernel", "combine_kernel"), weighted=True)

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        return also(super().supports(problem, device), pairs_decline(problem))

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> TritonLayer:
        from muster.moe.kernels.triton_layer import TritonLayer

        return TritonLayer.of(problem, weights)

    def run(self, prepared: TritonLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        prepared.run(x_TD, routed, out_TD, workspace)
