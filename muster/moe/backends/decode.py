"""`decode`: a fused function for 4-bit and FP8 experts and few tokens: fragments stream into tensor cores."""

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


@register_fused_func("decode")
class Decode(FragmentFunc):
    """Group, gate_up with activation, down with routing weight, combine: four launches."""

    facts = Facts(
        devices=frozenset({"8.0", "8.9", "9.0", "10.0", "12.0"}),
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
        max_tokens=128,
        packages=(Package("triton", ">=3.6"), Package("torch", ">=2.9")),
        kernels=("group_kernel", "expert_product", "combine_kernel"),
        rounding=Rounding(inner=Grid.BF16, weighted=Grid.BF16),
    )

    def run(self, prepared: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        from muster.moe.kernels import decode_layer

        decode_layer.run(prepared, x_TD, routed, out_TD, workspace)
