"""`wgmma`: a fused function for 4-bit and FP8 experts on Hopper; weights are decoded under the products."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from muster.contract import Package
from muster.formats.rounding import Grid, Rounding
from muster.moe.backend import Facts, Routed
from muster.moe.backends.fragments import FragmentFunc
from muster.moe.registry import register_fused_func
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.fragments import FragmentLayer


@register_fused_func("wgmma")
class Wgmma(FragmentFunc):
    """Lists of slots, tokens re-ordered, gate_up with activation, down with routing weight, combine."""

    facts = Facts(
        devices=frozenset({"9.0"}),
        weights=frozenset({"nvfp4", "mxfp4", "fp8-tensor", "fp8-channel", "fp8-block"}),
        dtypes=frozenset({"bf16"}),
        activations=frozenset({"silu", "swiglu-oai"}),
        bias=True,
        clamp=True,
        router_weight_on_input=True,
        zero_tokens=True,
        sentinel_ids=True,
        graph_safe=True,
        layout="fragments",
        deterministic=True,
        hidden_multiple=64,
        inner_multiple=64,
        packages=(Package("triton", ">=3.6"), Package("torch", ">=2.9")),
        kernels=("list_kernel", "arrange", "expert_product", "combine_kernel"),
        rounding=Rounding(inner=Grid.BF16, weighted=Grid.BF16),
    )

    def run(self, prepared: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        from muster.moe.kernels import wgmma_layer

        wgmma_layer.run(prepared, x_TD, routed, out_TD, workspace, e4m3=self.e4m3)
