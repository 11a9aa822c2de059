"""`wgmma_w4a8`: a fused function for NVFP4 experts on Hopper; the first product is of FP8, codes become e4m3."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from muster.formats.rounding import Grid, Rounding
from muster.moe.backend import FusedFunc, Routed
from muster.moe.backends.wgmma import Wgmma
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.fragments import FragmentLayer


@register_fused_func("wgmma_w4a8")
class WgmmaW4A8(FusedFunc["FragmentLayer"]):
    """As `wgmma`, but tokens are quantised per row and 128 columns, and gate_up's codes become e4m3 with their scale.

    e2m1 alone is exact in e4m3; times a block scale it is not, since a product of FP8 sums over more columns than share
    one: an eighth of it is rounded to e4m3. The second product is `wgmma`'s.
    """

    facts = replace(
        Wgmma.facts,
        weights=frozenset({"nvfp4"}),
        kernels=("quantise", *Wgmma.facts.kernels),
        layout="fragments of bytes",
        hidden_multiple=128,
        rounding=Rounding(first_weights=Grid.FP8_EIGHTH, input=Grid.FP8_GROUP, inner=Grid.BF16, weighted=Grid.BF16),
    )

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> FragmentLayer:
        from muster.moe.kernels.fragments import FragmentLayer

        return FragmentLayer.of(problem, weights, e4m3=True)

    def run(self, prepared: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        from muster.moe.kernels import wgmma_layer

        wgmma_layer.run(prepared, x_TD, routed, out_TD, workspace)
