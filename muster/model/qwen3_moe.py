"""Qwen3-MoE (Qwen team 2025, arXiv 2505.09388): each head of queries and keys is normed by itself."""

from __future__ import annotations

from muster.checkpoint.spec import AttentionSpec, GroupedAttention
from muster.model.attention import HeadNorm
from muster.model.decoder import Attention
from muster.model.parameters import Parameters


def attention(p: Parameters, layer: str, spec: AttentionSpec) -> Attention:
    """The attention block of one layer."""
    assert isinstance(spec, GroupedAttention)
    query_H = p.vector(f"{layer}.self_attn.q_norm.weight", spec.head_dim)
    key_H = p.vector(f"{layer}.self_attn.k_norm.weight", spec.head_dim)
    return p.grouped_attention(layer, spec, HeadNorm(query_H, key_H, spec, p.spec.norm_eps))
