"""The shape of every tensor of a model, from its spec alone: what the published checkpoints hold, without formats.

Sources: the reference implementations named by `architectures`; tests hold the totals against published byte counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from muster.checkpoint.names import ExpertNames, Names
from muster.checkpoint.spec import (
    AttentionSpec,
    DenseSpec,
    GatedDelta,
    GroupedAttention,
    LatentAttention,
    LayerSpec,
    MoESpec,
    VisionSpec,
)


@dataclass(frozen=True)
class Parameter:
    """One tensor of a model, or `count` alike, one per expert.

    Attributes:
        module: the module; `*` stands for the expert's number where `count` says how many experts.
        part: what follows the module's name (`weight`, `bias`); empty where the tensor has the module's own name.
        shape: its logical shape, `[N, K]` or `[E, N, K]` for matrices.
        linear: it is a linear layer's matrix, which quantisers treat.
        count: experts alike.
    """

    module: str
    part: str
    shape: tuple[int, ...]
    linear: bool = False
    count: int = 1


def draft_layer(names: Names) -> LayerSpec:
    """The layer of a draft (MTP) head: the decoder's last expert layer with full attention and its own indexer."""
    attention = next(
        (layer.attention for layer in reversed(names.spec.layers) if not isinstance(layer.attention, GatedDelta)),
        names.spec.layers[-1].attention,
    )
    if isinstance(attention, LatentAttention) and attention.indexer is not None:
        attention = replace(attention, indexer=replace(attention.indexer, shared=False))
    return LayerSpec(attention, names.spec.layers[-1].feed_forward)


def model(names: Names) -> Iterator[Parameter]:
    """The tensors outside the layers."""
    spec = names.spec
    yield Parameter(names.embed, "weight", (spec.vocab, spec.hidden))
    yield Parameter(names.norm, "weight", (spec.hidden,))
    if not spec.tied_embeddings:
        yield Parameter(names.head, "weight", (spec.vocab, spec.hidden), linear=True)


def decoder_layer(names: Names, layer: int, *, stacked: bool) -> Iterator[Parameter]:
    """The tensors of a decoder layer; `stacked`: all its experts in one tensor per projection."""
    yield from _layer(names, names.layer(layer), names.spec.layers[layer], stacked)


def draft(names: Names, number: int, *, stacked: bool) -> Iterator[Parameter]:
    """The tensors of draft layer `number`, its join with the decoder included."""
    hidden = names.spec.hidden
    root = names.layer(len(names.spec.layers) + number)
    after = names.family.draft == "after"
    join = root if after else "mtp"
    norms = ("enorm", "hnorm", "shared_head.norm") if after else ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    if after or number == 0:
        yield Parameter(f"{join}.{'eh_proj' if after else 'fc'}", "weight", (hidden, 2 * hidden), linear=True)
        yield from (Parameter(f"{join}.{norm}", "weight", (hidden,)) for norm in norms)
    if names.family.draft_copies:
        copied = (names.spec.vocab, hidden)
        yield Parameter(f"{root}.embed_tokens", "weight", copied)
        yield Parameter(f"{root}.shared_head.head", "weight", copied)
    yield from _layer(names, root, draft_layer(names), stacked)


def _layer(names: Names, root: str, layer: LayerSpec, stacked: bool) -> Iterator[Parameter]:
    hidden = names.spec.hidden
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Parameter(f"{root}.{norm}", "weight", (hidden,))
    yield from attention(layer.attention, root, hidden)
    if isinstance(layer.feed_forward, DenseSpec):
        yield from _gated(f"{root}.mlp", layer.feed_forward.inner, hidden)
    else:
        yield from _experts(layer.feed_forward, names.family.experts[0], root, hidden, stacked)


def attention(spec: AttentionSpec, root: str, hidden: int) -> Iterator[Parameter]:
    """The tensors of an attention block under the layer `root`."""
    if isinstance(spec, GatedDelta):
        return _gated_delta(spec, f"{root}.linear_attn", hidden)
    if isinstance(spec, GroupedAttention):
        return _grouped(spec, f"{root}.self_attn", hidden)
    return _latent(spec, f"{root}.self_attn", hidden)


def _grouped(spec: GroupedAttention, root: str, hidden: int) -> Iterator[Parameter]:
    q_rows, kv_rows = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    rows = {"q": q_rows * (2 if spec.output_gate else 1), "k": kv_rows, "v": kv_rows}
    for name, count in rows.items():
        yield Parameter(f"{root}.{name}_proj", "weight", (count, hidden), linear=True)
        if spec.qkv_bias:
            yield Parameter(f"{root}.{name}_proj", "bias", (count,))
    yield Parameter(f"{root}.o_proj", "weight", (hidden, q_rows), linear=True)
    if spec.output_bias:
        yield Parameter(f"{root}.o_proj", "bias", (hidden,))
    if spec.qk_norm != "none":
        per_head = spec.qk_norm == "head"
        yield Parameter(f"{root}.q_norm", "weight", (spec.head_dim if per_head else q_rows,))
        yield Parameter(f"{root}.k_norm", "weight", (spec.head_dim if per_head else kv_rows,))
    if spec.sinks:
        yield Parameter(f"{root}.sinks", "", (spec.heads,))


def _latent(spec: LatentAttention, root: str, hidden: int) -> Iterator[Parameter]:
    query_rows = spec.heads * (spec.nope_dim + spec.rope_dim)
    matrices = {
        "q_a_proj": (spec.q_lora, hidden),
        "q_b_proj": (query_rows, spec.q_lora),
        "kv_a_proj_with_mqa": (spec.kv_lora + spec.rope_dim, hidden),
        "kv_b_proj": (spec.heads * (spec.nope_dim + spec.value_dim), spec.kv_lora),
        "o_proj": (hidden, spec.heads * spec.value_dim),
    }
    yield from (Parameter(f"{root}.{name}", "weight", shape, linear=True) for name, shape in matrices.items())
    yield Parameter(f"{root}.q_a_layernorm", "weight", (spec.q_lora,))
    yield Parameter(f"{root}.kv_a_layernorm", "weight", (spec.kv_lora,))
    indexer = spec.indexer
    if indexer is None or indexer.shared:
        return
    index_matrices = {
        "wq_b": (indexer.heads * indexer.head_dim, spec.q_lora),
        "wk": (indexer.head_dim, hidden),
        "weights_proj": (indexer.heads, hidden),
    }
    for name, shape in index_matrices.items():
        yield Parameter(f"{root}.indexer.{name}", "weight", shape, linear=True)
    yield Parameter(f"{root}.indexer.k_norm", "weight", (indexer.head_dim,))
    yield Parameter(f"{root}.indexer.k_norm", "bias", (indexer.head_dim,))


def _gated_delta(spec: GatedDelta, root: str, hidden: int) -> Iterator[Parameter]:
    keys, values = spec.key_heads * spec.key_dim, spec.value_heads * spec.value_dim
    channels = 2 * keys + values
    if spec.fused:
        inputs = {"in_proj_qkvz": channels + values, "in_proj_ba": 2 * spec.value_heads}
    else:
        inputs = {
            "in_proj_qkv": channels,
            "in_proj_z": values,
            "in_proj_a": spec.value_heads,
            "in_proj_b": spec.value_heads,
        }
    yield from (Parameter(f"{root}.{name}", "weight", (rows, hidden), linear=True) for name, rows in inputs.items())
    yield Parameter(f"{root}.conv1d", "weight", (channels, 1, spec.kernel))
    yield Parameter(f"{root}.A_log", "", (spec.value_heads,))
    yield Parameter(f"{root}.dt_bias", "", (spec.value_heads,))
    yield Parameter(f"{root}.norm", "weight", (spec.value_dim,))
    yield Parameter(f"{root}.out_proj", "weight", (hidden, values), linear=True)


def _gated(root: str, inner: int, hidden: int) -> Iterator[Parameter]:
    """A gated feed-forward network."""
    for name in ("gate_proj", "up_proj"):
        yield Parameter(f"{root}.{name}", "weight", (inner, hidden), linear=True)
    yield Parameter(f"{root}.down_proj", "weight", (hidden, inner), linear=True)


def _experts(moe: MoESpec, names: ExpertNames, root: str, hidden: int, stacked: bool) -> Iterator[Parameter]:
    yield Parameter(f"{root}.{names.router}", "weight", (moe.experts, hidden))
    if moe.routing.gate_bias:
        yield Parameter(f"{root}.{names.router}", "bias", (moe.experts,))
    if moe.routing.selection_bias:
        module, _, part = names.selection_bias.rpartition(".")
        yield Parameter(f"{root}.{module}", part, (moe.experts,))
    experts = f"{root}.{names.experts}"
    if stacked:
        gate_up, down = f"{experts}.{names.gate_up_stacked}", f"{experts}.{names.down_stacked}"
        yield Parameter(gate_up, "", (moe.experts, 2 * moe.inner, hidden), linear=True)
        yield Parameter(down, "", (moe.experts, hidden, moe.inner), linear=True)
        if moe.bias:
            yield Parameter(f"{gate_up}_bias", "", (moe.experts, 2 * moe.inner))
            yield Parameter(f"{down}_bias", "", (moe.experts, hidden))
    else:
        shapes = {names.gate: (moe.inner, hidden), names.up: (moe.inner, hidden), names.down: (hidden, moe.inner)}
        for name, shape in shapes.items():
            yield Parameter(f"{experts}.*.{name}", "weight", shape, linear=True, count=moe.experts)
    if moe.shared is not None:
        yield from _gated(f"{root}.{names.shared}", moe.shared.inner, hidden)
        if moe.shared.gated:
            yield Parameter(f"{root}.{names.shared_gate}", "weight", (1, hidden))


def vision(spec: VisionSpec) -> Iterator[Parameter]:
    """The tensors of Qwen3.5's vision tower."""
    root, width = "model.visual", spec.hidden
    merged = width * spec.merge**2
    patch = (width, spec.channels, spec.temporal_patch, spec.patch, spec.patch)
    yield from _affine(f"{root}.patch_embed.proj", patch)
    yield Parameter(f"{root}.pos_embed", "weight", (spec.positions, width))
    for number in range(spec.depth):
        block = f"{root}.blocks.{number}"
        yield from _affine(f"{block}.norm1", (width,))
        yield from _affine(f"{block}.attn.qkv", (3 * width, width))
        yield from _affine(f"{block}.attn.proj", (width, width))
        yield from _affine(f"{block}.norm2", (width,))
        yield from _affine(f"{block}.mlp.linear_fc1", (spec.inner, width))
        yield from _affine(f"{block}.mlp.linear_fc2", (width, spec.inner))
    yield from _affine(f"{root}.merger.norm", (width,))
    yield from _affine(f"{root}.merger.linear_fc1", (merged, merged))
    yield from _affine(f"{root}.merger.linear_fc2", (spec.out, merged))


def _affine(module: str, shape: tuple[int, ...]) -> Iterator[Parameter]:
    yield Parameter(module, "weight", shape)
    yield Parameter(module, "bias", shape[:1])
