"""`wgmma_w4a8`: a fused function for NVFP4 experts on Hopper; the first product is of FP8, codes become e4m3."""

from __future__ import annotations

from dataclasses import replace

from muster.formats.rounding import Grid, Rounding
from muster.moe.backends.wgmma import Wgmma
from muster.moe.registry import register_fused_func


@register_fused_func("wgmma_w4a8")
class WgmmaW4A8(Wgmma):
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
    e4m3 = True
