"""The architectures Muster recognises: one row and one small function each, from config keys to layers.

Sources: the published config.json files and the reference implementations named by `architectures`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from muster.checkpoint.fields import Fields, plural
from muster.checkpoint.rope import read_rope, softmax_scale
from muster.checkpoint.spec import (
    AttentionSpec,
    DenseSpec,
    GatedDelta,
    GroupedAttention,
    IndexerSpec,
    LatentAttention,
    LayerSpec,
    MoESpec,
    RopeSpec,
    RoutingSpec,
    SharedExpertSpec,
)

MOST_LAYERS = 4096
"""Far above any published depth; keeps a mistyped number from filling the memory."""

MOST_EXPERTS = 16384
"""The same for the experts of a layer."""

_SIGMOID_EPSILON = 1e-20
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu"}


@dataclass(frozen=True)
class Family:
    """One model family.

    Attributes:
        name: the config's model_type, and ours.
        architectures: what `architectures[0]` may say.
        layers: reads the decoder layers; writes its problems into the fields' ledger.
        prefix: what the text model's tensor names start with.
        nested: allowed model types of `text_config` where the text model's keys live there; empty: they are flat.
        drafts: reads how many MTP layers are declared.
        norm_zero_centred: norms multiply by (1 + w).
    """

    name: str
    architectures: tuple[str, ...]
    layers: Callable[[Fields], tuple[LayerSpec, ...]]
    prefix: str = "model."
    nested: tuple[str, ...] = ()
    drafts: Callable[[Fields], int] | None = None
    norm_zero_centred: bool = False


def _mixtral(c: Fields) -> tuple[LayerSpec, ...]:
    attention = _grouped(c, window=c.maybe_whole("sliding_window"))
    return _uniform(c, attention, _moe(c, "intermediate_size", _softmax(c)))


def _olmoe(c: Fields) -> tuple[LayerSpec, ...]:
    bias = c.flag("attention_bias", default=False)
    attention = _grouped(c, qkv_bias=bias, output_bias=bias, qk_norm="full", clip_qkv=c.maybe_number("clip_qkv"))
    return _uniform(c, attention, _moe(c, "intermediate_size", _softmax(c, renormalise=c.flag("norm_topk_prob"))))


def _qwen3_moe(c: Fields) -> tuple[LayerSpec, ...]:
    bias = c.flag("attention_bias", "qkv_bias", default=False)
    c.same("use_qk_norm", True)
    c.same("use_sliding_window", False)
    c.waive("sliding_window")
    attention = _grouped(c, qkv_bias=bias, output_bias=bias, qk_norm="head")
    moe = _moe(c, "moe_intermediate_size", _softmax(c, renormalise=c.flag("norm_topk_prob")))
    return _uniform(c, attention, moe)


def _qwen3_next(c: Fields) -> tuple[LayerSpec, ...]:
    return _hybrid(c, renormalise=c.flag("norm_topk_prob"), fused=True, output_gate=True)


def _qwen3_5(c: Fields) -> tuple[LayerSpec, ...]:
    c.same("norm_topk_prob", True)
    return _hybrid(c, renormalise=True, fused=False, output_gate=c.flag("attn_output_gate", default=True))


def _hybrid(c: Fields, *, renormalise: bool, fused: bool, output_gate: bool) -> tuple[LayerSpec, ...]:
    """Gated DeltaNet layers with a full-attention layer in between (Qwen3-Next, Qwen3.5)."""
    bias = c.flag("attention_bias", default=False)
    c.same("use_sliding_window", False)
    full = _grouped(
        c, derive_head_dim=False, partial=True, qkv_bias=bias, output_bias=bias, qk_norm="head", output_gate=output_gate
    )
    linear = GatedDelta(
        key_heads=c.whole("linear_num_key_heads"),
        value_heads=c.whole("linear_num_value_heads"),
        key_dim=c.whole("linear_key_head_dim"),
        value_dim=c.whole("linear_value_head_dim"),
        kernel=c.whole("linear_conv_kernel_dim"),
        state_dtype=read_dtype(c, "mamba_ssm_dtype", default="float32"),
        fused=fused,
    )
    c.check(
        linear.value_heads % linear.key_heads == 0,
        ("linear_num_value_heads", "linear_num_key_heads"),
        "linear_num_value_heads",
        f"{linear.value_heads} value heads for linear_num_key_heads {linear.key_heads}",
        "a multiple",
    )
    kinds: dict[str, AttentionSpec] = {"linear_attention": linear, "full_attention": full}
    attention = [kinds[name] for name in _hybrid_types(c, tuple(kinds))]
    shared = c.whole("shared_expert_intermediate_size", least=0)
    moe = _moe(c, "moe_intermediate_size", _softmax(c, renormalise=renormalise))
    return _stack(c, attention, replace(moe, shared=SharedExpertSpec(shared, gated=True) if shared else None))


def _hybrid_types(c: Fields, kinds: tuple[str, ...]) -> Sequence[str]:
    """Layer kinds from `layer_types`, from `full_attention_interval` (layer i is full iff i+1 divides), or both."""
    count = _depth(c)
    listed = _per_layer(c, "layer_types", kinds)
    interval = c.maybe_whole("full_attention_interval")
    if interval is None:
        c.check(
            listed is not None or not c.sound("layer_types"),
            ("full_attention_interval",),
            "layer_types",
            "nothing",
            "a list of layer kinds, or full_attention_interval",
        )
        return listed or [kinds[1]] * count
    ruled = [kinds[1] if (i + 1) % interval == 0 else kinds[0] for i in range(count)]
    if listed is not None:
        _agree(c, ("layer_types", listed), (f"full_attention_interval {interval}", ruled))
    return listed or ruled


def _gpt_oss(c: Fields) -> tuple[LayerSpec, ...]:
    bias = c.flag("attention_bias", default=True)
    c.same("hidden_act", "silu")
    full = _grouped(c, derive_head_dim=False, qkv_bias=bias, output_bias=bias, sinks=True)
    kinds = _per_layer(c, "layer_types", ("sliding_attention", "full_attention"))
    c.check(kinds is not None or not c.sound("layer_types"), (), "layer_types", "nothing", "a list of layer kinds")
    windowed = kinds is not None and "sliding_attention" in kinds
    window = c.whole("sliding_window") if windowed else c.maybe_whole("sliding_window")
    sliding = replace(full, window=window)
    routing = replace(_softmax(c), softmax_after_top_k=True, gate_bias=True)
    moe = replace(
        _moe(c, "intermediate_size", routing),
        activation="swiglu-oai",
        limit=c.number("swiglu_limit", default=7.0),
        alpha=c.number("swiglu_alpha", default=1.702),
        bias=True,
    )
    attention = [sliding if kind == "sliding_attention" else full for kind in kinds or ()]
    return _stack(c, attention, moe)


def _minimax(c: Fields) -> tuple[LayerSpec, ...]:
    c.same("qk_norm_type", "per_layer")
    attention = _grouped(c, partial=True, qk_norm="full" if c.flag("use_qk_norm", default=True) else "none")
    types = c.numbers("attn_type_list")
    c.check(
        types is None or set(types) == {1},
        ("attn_type_list",),
        "attn_type_list",
        "layers of other kinds",
        "1 (full attention) for every layer",
    )
    routing = _sigmoid(c, selection_bias=c.flag("use_routing_bias", default=True))
    return _uniform(c, attention, _moe(c, "intermediate_size", routing))


def _glm4(c: Fields) -> tuple[LayerSpec, ...]:
    norm: Literal["head", "none"] = "head" if c.flag("use_qk_norm", default=False) else "none"
    attention = _grouped(c, partial=True, qkv_bias=c.flag("attention_bias", default=False), qk_norm=norm)
    return _uniform(c, attention, _deepseek_moe(c))


def _deepseek_v3(c: Fields) -> tuple[LayerSpec, ...]:
    return _uniform(c, _latent(c), _deepseek_moe(c))


def _deepseek_v32(c: Fields) -> tuple[LayerSpec, ...]:
    return _sparse_latent(c, indexer_interleaved=False)


def _glm_dsa(c: Fields) -> tuple[LayerSpec, ...]:
    return _sparse_latent(c, indexer_interleaved=True)


def _sparse_latent(c: Fields, *, indexer_interleaved: bool) -> tuple[LayerSpec, ...]:
    """Latent attention over the keys that an indexer picks (DeepSeek-V3.2, GLM-5)."""
    _per_layer(c, "layer_types", ("deepseek_sparse_attention", "indexed_attention"))
    c.waive("index_share_for_mtp_iteration")
    full = IndexerSpec(
        heads=c.whole("index_n_heads"),
        head_dim=c.whole("index_head_dim"),
        top_k=c.whole("index_topk"),
        rope_interleaved=c.flag("indexer_rope_interleave", default=indexer_interleaved),
    )
    owner = replace(_latent(c), indexer=full)
    follower = replace(owner, indexer=replace(full, shared=True))
    attention = [follower if kind == "shared" else owner for kind in _indexer_types(c)]
    return _stack(c, attention, _deepseek_moe(c))


def _indexer_types(c: Fields) -> Sequence[str]:
    """Which layers own an indexer: `indexer_types`, or every `index_topk_freq`-th from `index_skip_topk_offset` on."""
    count = _depth(c)
    listed = _per_layer(c, "indexer_types", ("full", "shared"))
    frequency = c.maybe_whole("index_topk_freq")
    offset = c.maybe_whole("index_skip_topk_offset", least=0)
    if frequency is None:
        c.check(
            offset is None, ("index_topk_freq",), "index_skip_topk_offset", f"{offset} without index_topk_freq", "both"
        )
        return listed or ["full"] * count
    c.check(
        offset is not None or frequency == 1,
        ("index_skip_topk_offset",),
        "index_topk_freq",
        f"{frequency} without index_skip_topk_offset",
        "both",
    )
    start = offset or 0
    ruled = ["shared" if max(i - start + 1, 0) % frequency else "full" for i in range(count)]
    if listed is not None:
        _agree(c, ("indexer_types", listed), (f"index_topk_freq {frequency}, index_skip_topk_offset {start}", ruled))
    first = (listed or ruled)[0]
    c.check(
        first == "full",
        ("indexer_types", "index_topk_freq"),
        "indexer_types",
        "layer 0 is shared",
        "layer 0 to own an indexer",
    )
    return listed or ruled


def _grouped(
    c: Fields,
    *,
    derive_head_dim: bool = True,
    partial: bool = False,
    window: int | None = None,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: Literal["none", "head", "full"] = "none",
    sinks: bool = False,
    output_gate: bool = False,
    clip_qkv: float | None = None,
) -> GroupedAttention:
    heads = c.whole("num_attention_heads")
    kv_heads = c.whole("num_key_value_heads")
    head_dim = c.maybe_whole("head_dim") if derive_head_dim else c.whole("head_dim")
    if head_dim is None:
        hidden = c.whole("hidden_size")
        found = f"nothing, and hidden_size {hidden} is no multiple of num_attention_heads {heads}"
        keys = ("head_dim", "hidden_size", "num_attention_heads")
        c.check(hidden % heads == 0, keys, "head_dim", found, "head_dim, or a hidden_size of whole heads")
        head_dim = max(hidden // heads, 1)
    found = f"{heads} query heads for num_key_value_heads {kv_heads}"
    c.check(heads % kv_heads == 0, _HEADS, "num_attention_heads", found, "a multiple")
    rope = read_rope(c, head_dim, partial=partial)
    c.check(rope.width % 2 == 0, ("head_dim", "hidden_size"), "head_dim", str(head_dim), "an even number")
    return GroupedAttention(
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        scale=softmax_scale(head_dim, rope),
        qkv_bias=qkv_bias,
        output_bias=output_bias,
        qk_norm=qk_norm,
        window=window,
        sinks=sinks,
        output_gate=output_gate,
        clip_qkv=clip_qkv,
    )


def _latent(c: Fields) -> LatentAttention:
    c.same("attention_bias", False)
    c.waive("head_dim", "num_key_value_heads")  # nominal in MLA configs
    nope, rotated = c.whole("qk_nope_head_dim"), c.whole("qk_rope_head_dim")
    stated = c.maybe_whole("qk_head_dim")
    found = f"{stated} and qk_nope_head_dim {nope} + qk_rope_head_dim {rotated}"
    keys = ("qk_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
    c.check(stated in (None, nope + rotated), keys, "qk_head_dim", found, "the sum")
    rope: RopeSpec = read_rope(c, rotated, interleaved=c.flag("rope_interleave", default=True), latent=True)
    c.check(rotated % 2 == 0, ("qk_rope_head_dim",), "qk_rope_head_dim", str(rotated), "an even number")
    return LatentAttention(
        heads=c.whole("num_attention_heads"),
        q_lora=c.whole("q_lora_rank"),
        kv_lora=c.whole("kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rotated,
        value_dim=c.whole("v_head_dim"),
        rope=rope,
        scale=softmax_scale(nope + rotated, rope),
    )


def _softmax(c: Fields, *, renormalise: bool = True) -> RoutingSpec:
    c.same("scoring_func", "softmax")
    return RoutingSpec(top_k=_top_k(c), scoring="softmax", renormalise=renormalise)


def _sigmoid(c: Fields, *, selection_bias: bool = True, renormalise: bool = True) -> RoutingSpec:
    c.same("scoring_func", "sigmoid")
    return RoutingSpec(
        top_k=_top_k(c),
        scoring="sigmoid",
        selection_bias=selection_bias,
        renormalise=renormalise,
        epsilon=_SIGMOID_EPSILON,
    )


def _deepseek_moe(c: Fields) -> MoESpec:
    """Sigmoid routing with a selection bias, groups, a scaling factor and ungated shared experts."""
    c.same("topk_method", "noaux_tc")
    c.same("moe_router_dtype", "float32")
    routing = replace(
        _sigmoid(c, renormalise=c.flag("norm_topk_prob")),
        groups=c.whole("n_group", default=1),
        groups_kept=c.whole("topk_group", default=1),
        scaling_factor=c.number("routed_scaling_factor"),
    )
    moe = _moe(c, "moe_intermediate_size", routing)
    _check_groups(c, moe)
    shared = c.whole("n_shared_experts", default=0, least=0)
    return replace(moe, shared=SharedExpertSpec(shared * moe.inner) if shared else None)


def _check_groups(c: Fields, moe: MoESpec) -> None:
    rule, experts = moe.routing, moe.experts
    equal, kept = experts % rule.groups == 0, rule.groups_kept <= rule.groups
    found = f"{rule.groups}, which does not divide the {experts} experts"
    c.check(equal, ("n_group", *_EXPERTS), "n_group", found, "a divisor")
    found = f"{rule.groups_kept} of n_group {rule.groups}"
    c.check(kept, ("n_group", "topk_group"), "topk_group", found, "no more than there are")
    size = experts // rule.groups
    if equal and kept and rule.groups > 1:
        c.check(size > 1, ("n_group", *_EXPERTS), "n_group", f"groups of {size} expert", "two experts or more in each")
        found = f"{rule.groups_kept} groups of {size} experts for top-k {rule.top_k}"
        enough = rule.top_k <= size * rule.groups_kept
        c.check(enough, ("n_group", "topk_group", *_EXPERTS, *_TOP_K), "topk_group", found, "top-k experts in them")


_HEADS = ("num_attention_heads", "num_key_value_heads")
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token", "moe_top_k")


def _top_k(c: Fields) -> int:
    return c.whole(*_TOP_K)


def _moe(c: Fields, inner_key: str, routing: RoutingSpec) -> MoESpec:
    experts = c.whole(*_EXPERTS, most=MOST_EXPERTS)
    c.check(
        routing.top_k <= experts, (*_EXPERTS, *_TOP_K), _TOP_K[0], f"{routing.top_k} of {experts} experts", "no more"
    )
    return MoESpec(experts=experts, inner=c.whole(inner_key), routing=routing, activation=_activation(c))


def _activation(c: Fields) -> str:
    return _ACTIVATIONS[c.word("hidden_act", choices=tuple(_ACTIVATIONS), default="silu")]


def _uniform(c: Fields, attention: GroupedAttention | LatentAttention, moe: MoESpec) -> tuple[LayerSpec, ...]:
    """The decoder when all layers attend alike."""
    windowed = isinstance(attention, GroupedAttention) and attention.window is not None
    _per_layer(c, "layer_types", ("sliding_attention",) if windowed else ("full_attention",))
    return _stack(c, [attention] * _depth(c), moe)


def _stack(c: Fields, attention: Sequence[AttentionSpec], moe: MoESpec) -> tuple[LayerSpec, ...]:
    """The decoder: the attention of each layer, expert layers where the layer maps say so."""
    sparse = _sparse_layers(c, _depth(c))
    dense = None if all(sparse) else DenseSpec(c.whole("intermediate_size"), _activation(c))
    c.waive("intermediate_size")
    return tuple(
        LayerSpec(attention=one, feed_forward=moe if is_sparse or dense is None else dense)
        for one, is_sparse in zip(attention, sparse, strict=False)
    )


def _depth(c: Fields) -> int:
    return c.whole("num_hidden_layers", most=MOST_LAYERS)


def _sparse_layers(c: Fields, count: int) -> Sequence[bool]:
    """Which layers have experts; every map that the config states must say the same."""
    maps: list[tuple[str, Sequence[str]]] = []

    def add(source: str, sparse: Callable[[int], bool]) -> None:
        maps.append((source, ["sparse" if sparse(i) else "dense" for i in range(count)]))

    first = c.maybe_whole("first_k_dense_replace", least=0)
    frequency = c.whole("moe_layer_freq", default=1)
    if first is not None or frequency != 1:
        add(
            f"first_k_dense_replace {first or 0}, moe_layer_freq {frequency}",
            lambda i: i >= (first or 0) and i % frequency == 0,
        )
    only = c.numbers("mlp_only_layers")
    step = c.whole("decoder_sparse_step", default=1)
    if only is not None or step != 1:
        dense = frozenset(only or ())
        outside = [i for i in sorted(dense) if i >= count]
        c.check(
            not outside,
            ("mlp_only_layers", "num_hidden_layers"),
            "mlp_only_layers",
            f"layers {outside[:5]}",
            f"layers below num_hidden_layers {count}",
        )
        add(
            f"mlp_only_layers of {plural(len(dense), 'layer')}, decoder_sparse_step {step}",
            lambda i: i not in dense and (i + 1) % step == 0,
        )
    listed = _per_layer(c, "mlp_layer_types", ("sparse", "dense"))
    if listed is not None:
        maps.append(("mlp_layer_types", listed))
    for other in maps[1:]:
        _agree(c, maps[0], other)
    return [kind == "sparse" for kind in maps[-1][1]] if maps else [True] * count


def _per_layer(c: Fields, key: str, kinds: tuple[str, ...]) -> Sequence[str] | None:
    """A list with one known kind per layer, or None; anything else is a problem."""
    listed = c.names(key)
    if listed is None:
        return None
    count = _depth(c)
    both = (key, "num_hidden_layers")
    c.check(len(listed) == count, both, key, f"{len(listed)} entries and num_hidden_layers {count}", "one per layer")
    unknown = sorted(set(listed) - set(kinds))
    c.check(not unknown, (key,), key, ", ".join(unknown[:5]), " or ".join(kinds))
    return listed if len(listed) == count and not unknown else None


def _agree(c: Fields, one: tuple[str, Sequence[str]], other: tuple[str, Sequence[str]]) -> None:
    differing = [i for i, (a, b) in enumerate(zip(one[1], other[1], strict=True)) if a != b]
    if differing:
        i = differing[0]
        found = (
            f"layer {i} is {one[1][i]} there and {other[1][i]} by {other[0]} ({plural(len(differing), 'layer')} differ)"
        )
        c.check(False, ("num_hidden_layers",), one[0], found, "one answer per layer")


def _nextn(c: Fields) -> int:
    return c.whole("num_nextn_predict_layers", default=0, least=0, most=MOST_LAYERS)


def _qwen_drafts(c: Fields) -> int:
    c.same("mtp_use_dedicated_embeddings", False)
    return c.whole("mtp_num_hidden_layers", default=0, least=0, most=MOST_LAYERS)


def _minimax_drafts(c: Fields) -> int:
    modules = c.whole("num_mtp_modules", default=0, least=0, most=MOST_LAYERS)
    layers = c.whole("mtp_transformer_layers", default=1, least=0, most=MOST_LAYERS)
    return modules * layers if c.flag("use_mtp", default=False) else 0


def read_dtype(c: Fields, *keys: str, default: str) -> Literal["bf16", "f16", "f32"]:
    """A dtype in our words."""
    names: dict[str, Literal["bf16", "f16", "f32"]] = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}
    return names[c.word(*keys, choices=tuple(names), default=default)]


FAMILIES: tuple[Family, ...] = (
    Family("mixtral", ("MixtralForCausalLM",), _mixtral),
    Family("olmoe", ("OlmoeForCausalLM",), _olmoe),
    Family("qwen3_moe", ("Qwen3MoeForCausalLM",), _qwen3_moe),
    Family("qwen3_next", ("Qwen3NextForCausalLM",), _qwen3_next, drafts=_qwen_drafts, norm_zero_centred=True),
    Family(
        "qwen3_5_moe",
        ("Qwen3_5MoeForConditionalGeneration",),
        _qwen3_5,
        prefix="model.language_model.",
        nested=("qwen3_5_moe_text",),
        drafts=_qwen_drafts,
        norm_zero_centred=True,
    ),
    Family("qwen3_5_moe_text", ("Qwen3_5MoeForCausalLM",), _qwen3_5, drafts=_qwen_drafts, norm_zero_centred=True),
    Family("glm4_moe", ("Glm4MoeForCausalLM",), _glm4, drafts=_nextn),
    Family("glm_moe_dsa", ("GlmMoeDsaForCausalLM",), _glm_dsa, drafts=_nextn),
    Family("deepseek_v3", ("DeepseekV3ForCausalLM",), _deepseek_v3, drafts=_nextn),
    Family("deepseek_v32", ("DeepseekV32ForCausalLM",), _deepseek_v32, drafts=_nextn),
    Family("kimi_k2", ("DeepseekV3ForCausalLM",), _deepseek_v3, drafts=_nextn),
    Family(
        "kimi_k25",
        ("KimiK25ForConditionalGeneration",),
        _deepseek_v3,
        prefix="language_model.model.",
        nested=("kimi_k2", "deepseek_v3"),
        drafts=_nextn,
    ),
    Family("gpt_oss", ("GptOssForCausalLM",), _gpt_oss),
    Family("minimax_m2", ("MiniMaxM2ForCausalLM",), _minimax, drafts=_minimax_drafts),
)
