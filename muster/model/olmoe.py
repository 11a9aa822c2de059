"""OLMoE (Muennighoff et al. 2024, arXiv 2409.02060): queries and keys are normed over all their heads at once."""

from __future__ import annotations

from muster.checkpoint.spec import AttentionSpec, GroupedAttention
from muster.model.attention import WidthNorm
from muster.model.decoder import Attention
from muster.model.parameters import Parameters


def attention(p: Parameters, layer: str, spec: AttentionSpec) -> Attention:
    """The attention block of one layer."""
    assert isinstance(spec, GroupedAttention)
    query_X = p.vector(f"{layer}.self_attn.q_norm.weight", spec.heads * spec.head_dim)
    key_Y = p.vector(f"{layer}.self_attn.k_norm.weight", spec.kv_heads * spec.head_dim)
    return p.grouped_attention(layer, spec, WidthNorm(query_X, key_Y, p.spec.norm_eps))
