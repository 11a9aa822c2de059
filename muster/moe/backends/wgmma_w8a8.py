"""`wgmma_w8a8`: a fused function for FP8 experts on Hopper; the first product is of FP8 tokens too."""

from __future__ import annotations

from dataclasses import replace

from muster.formats.rounding import Grid, Rounding
from muster.moe.backends.wgmma import Wgmma
from muster.moe.registry import register_fused_func


@register_fused_func("wgmma_w8a8")
class WgmmaW8A8(Wgmma):
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
    e4m3 = True
