"""`wgmma_w8a8`: a fused function for FP8 experts on Hopper; the first product is of FP8 tokens too."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from muster.contract import Decline
from muster.device import Device
from muster.formats.rounding import Grid, Rounding
from muster.moe.backend import FusedFunc, Routed
from muster.moe.backends.decode import whole_blocks
from muster.moe.backends.triton import also
from muster.moe.backends.wgmma import Wgmma
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.fragments import FragmentLayer


@register_fused_func("wgmma_w8a8")
class WgmmaW8A8(FusedFunc["FragmentLayer"]):
    """As `wgmma`, but tokens are quantised per row and 128 columns, and no code of gate_up is decoded.

    What the activation function gives stays in bf16, for the reason that `triton_w8a8` names.
    """

    facts = replace(
        Wgmma.facts,
        weights=frozenset({"fp8-tensor", "fp8-channel", "fp8-block"}),
        kernels=("quantise", *Wgmma.facts.kernels),
        hidden_multiple=128,
        rounding=Rounding(input=Grid.FP8_GROUP, inner=Grid.BF16, weighted=Grid.BF16),
    )

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        return also(super().supports(problem, device), whole_blocks(problem))

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> FragmentLayer:
        from muster.moe.kernels.fragments import FragmentLayer

        return FragmentLayer.of(problem, weights, e4m3=True)

    def run(self, prepared: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        from muster.moe.kernels import wgmma_layer

        wgmma_layer.run(prepared, x_TD, routed, out_TD, workspace)
