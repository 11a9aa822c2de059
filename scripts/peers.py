"""The other engines that ours are compared with.

Each layout is made by the engine's own functions from the very codes and scales that our backends get, and each call
does what that engine does between routing and combined output on one GPU. Where they round was read in their source.
"""

from __future__ import annotations

from dataclasses import replace

from peer import Peer
from peer_humming import Humming
from peer_vllm import Marlin, TritonKernels, VllmTriton

from muster.formats.rounding import Grid, Rounding

_BETWEEN = Rounding(product=Grid.BF16, inner=Grid.BF16)
"""bf16 between the kernels."""
_FP4 = frozenset({"nvfp4", "mxfp4"})
_ACTIVATIONS = frozenset({"silu", "swiglu-oai"})
_SILU = frozenset({"silu"})
_FP8_GROUPS = Rounding(input=Grid.FP8_GROUP, product=Grid.BF16, inner=Grid.FP8_GROUP, weighted=Grid.BF16)

PEERS: tuple[Peer, ...] = (
    Marlin("vllm-marlin", "vllm", _FP4, _ACTIVATIONS, True, replace(_BETWEEN, weighted=Grid.BF16)),
    VllmTriton("vllm-triton", "vllm", frozenset({"bf16"}), _SILU, False, replace(_BETWEEN, weighted=Grid.BF16)),
    VllmTriton("vllm-triton", "vllm", frozenset({"fp8-block"}), _SILU, False, _FP8_GROUPS),
    TritonKernels(
        "triton_kernels",
        "vllm",
        frozenset({"mxfp4"}),
        frozenset({"swiglu-oai"}),
        True,
        Rounding(inner=Grid.BF16, weighted=Grid.BF16),
    ),
    Humming("humming", "humming", _FP4, _ACTIVATIONS, True, replace(_BETWEEN, rows=Grid.BF16)),
)
"""What a name means depends on the format; of one format a name has one peer."""
