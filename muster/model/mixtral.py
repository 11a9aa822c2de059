"""Mixtral (Jiang et al. 2024, arXiv 2401.04088): plain grouped-query attention, with a sliding window if stated."""

from __future__ import annotations

from muster.checkpoint.spec import AttentionSpec, GroupedAttention
from muster.model.decoder import Attention
from muster.model.parameters import Parameters


def attention(p: Parameters, layer: str, spec: AttentionSpec) -> Attention:
    """The attention block of one layer."""
    assert isinstance(spec, GroupedAttention)
    return p.grouped_attention(layer, spec)
