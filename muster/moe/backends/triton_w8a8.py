"""`triton_w8a8`: a fused function on GPUs that multiply FP8: tokens in e4m3, quantised as they come."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor

from muster.formats.rounding import Grid, Rounding
from muster.moe.backend import FusedFunc, Routed
from muster.moe.backends.triton_fused import TritonFused
from muster.moe.kernels.triton_tiles import E4M3_TOKENS
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.triton_layer import TritonLayer


@register_fused_func("triton_w8a8")
class TritonW8A8(FusedFunc["TritonLayer"]):
    """As `triton_fused`, with a launch that quantises tokens per row and 128 columns; `gate_up` is a product of FP8.

    That is also the rounding where weights have a scale per row or per matrix: it is finer than a scale per token, and
    costs nothing, since sums over more than 128 columns are added outside the tensor core anyway.

    What the activation function gives stays in bf16. Tensor cores up to Hopper's keep 14 bits of a sum of FP8 products;
    the first such product is off by a thousandth, as bf16 is, and codes made from it would not be those that anybody
    else makes: right still, but at four times the distance (docs/kernel-notes.md).
    """

    facts = replace(
        TritonFused.facts,
        devices=frozenset({"8.9", "9.0", "10.0", "12.0"}),
        weights=frozenset({"fp8-tensor", "fp8-channel", "fp8-block"}),
        kernels=(*TritonFused.facts.kernels, "quantise_kernel"),
        tiles=E4M3_TOKENS,
        layout="triton for e4m3 tokens",
        rounding=Rounding(input=Grid.FP8_GROUP, inner=Grid.BF16, weighted=Grid.BF16),
    )

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> TritonLayer:
        from muster.moe.kernels.triton_layer import TritonLayer

        return TritonLayer.of(problem, weights, e4m3=True)

    def run(self, prepared: TritonLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        prepared.run(x_TD, routed, out_TD, workspace)
