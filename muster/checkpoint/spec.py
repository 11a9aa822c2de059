"""ModelSpec: what a config.json says of a model, in one frozen form whatever the dialect. No torch, no tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class YarnSpec:
    """YaRN context extension (Peng et al. 2023), as the config states it.

    Attributes:
        factor: context multiplier.
        original_context: positions the model was trained on (`original_max_position_embeddings`).
        beta_fast, beta_slow: rotations that bound the ramp.
        truncate: round the ramp's ends to whole dimensions.
        attention_factor: multiplies cos and sin.
        mscale_all_dim: the attention's `scale` includes (0.1 * mscale_all_dim * ln(factor) + 1)^2; 0: nothing.
    """

    factor: float
    original_context: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    mscale_all_dim: float = 0.0


@dataclass(frozen=True)
class RopeSpec:
    """Rotary position embedding of the first `width` entries of each head (of the last ones in MLA).

    `interleaved` pairs (2j, 2j+1); otherwise (j, j + width/2).
    """

    theta: float
    width: int
    interleaved: bool = False
    yarn: YarnSpec | None = None


@dataclass(frozen=True)
class GroupedAttention:
    """Multi-head or grouped-query attention.

    Attributes:
        heads, kv_heads, head_dim: N, M, H.
        rope: rotary embedding.
        qkv_bias, output_bias: biases on the projections.
        qk_norm: RMS norm of queries and keys: per head, over the full projection width, or none.
        window: last tokens seen (itself included); None: all.
        sinks: a learned logit per head joins the softmax's denominator (gpt-oss).
        output_gate: q_proj carries a gate per head, sigmoid of it multiplies the output (Qwen3.5).
        scale: softmax scale, complete.
        clip_qkv: clamp of the projections (OLMoE option), None: none.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec
    scale: float
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["none", "head", "full"] = "none"
    window: int | None = None
    sinks: bool = False
    output_gate: bool = False
    clip_qkv: float | None = None


@dataclass(frozen=True)
class IndexerSpec:
    """DeepSeek sparse attention's indexer; `shared` layers reuse the previous full layer's choice."""

    heads: int
    head_dim: int
    top_k: int
    rope_interleaved: bool
    shared: bool = False


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V3, Kimi-K2, GLM-5); `scale` is complete, YaRN's part included."""

    heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    rope: RopeSpec
    scale: float
    indexer: IndexerSpec | None = None


@dataclass(frozen=True)
class GatedDelta:
    """Gated DeltaNet linear attention (Qwen3-Next, Qwen3.5); `fused` when qkvz and ba are stored interleaved."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    kernel: int
    state_dtype: str
    fused: bool


AttentionSpec = GroupedAttention | LatentAttention | GatedDelta


@dataclass(frozen=True)
class RoutingSpec:
    """The router's rule, in the words of `moe.problem.RoutingRule`, plus whether the gate itself has a bias."""

    top_k: int
    scoring: Literal["softmax", "sigmoid", "sqrt-softplus"] = "softmax"
    softmax_after_top_k: bool = False
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    renormalise: bool = True
    scaling_factor: float = 1.0
    epsilon: float = 0.0
    gate_bias: bool = False


@dataclass(frozen=True)
class DenseSpec:
    """A dense gated feed-forward layer of width `inner`."""

    inner: int
    activation: str = "silu"


@dataclass(frozen=True)
class SharedExpertSpec:
    """A shared expert; `gated` when sigmoid(x . w_g) multiplies it."""

    inner: int
    gated: bool = False


@dataclass(frozen=True)
class MoESpec:
    """A Mixture-of-Experts feed-forward layer; `limit` and `alpha` as in `moe.problem.Activation`."""

    experts: int
    inner: int
    routing: RoutingSpec
    activation: str = "silu"
    limit: float | None = None
    alpha: float = 1.702
    bias: bool = False
    shared: SharedExpertSpec | None = None


@dataclass(frozen=True)
class LayerSpec:
    """One decoder layer: pre-norm attention, pre-norm feed-forward."""

    attention: AttentionSpec
    feed_forward: DenseSpec | MoESpec


@dataclass(frozen=True)
class VisionSpec:
    """Qwen3.5's vision tower, counted but never run.

    Attributes:
        depth, hidden, inner: blocks, width, feed-forward width.
        channels, patch, temporal_patch: what one patch covers.
        merge: patches merged along each side.
        positions: learned position embeddings.
        out: width it hands to the decoder.
    """

    depth: int
    hidden: int
    inner: int
    channels: int
    patch: int
    temporal_patch: int
    merge: int
    positions: int
    out: int


Activations = Literal["none", "dynamic", "static"]
"""What a scheme does to a layer's input: nothing, quantise it as it comes, or with a scale that is stored."""


@dataclass(frozen=True)
class QuantClaim:
    """What the config claims about quantisation; the tensors outrank it.

    Attributes:
        method: `quant_method` (modelopt, compressed-tensors, fp8, mxfp4, gptq, awq, ...).
        algorithm: the format name it claims for whatever `ignore` and `layers` do not name; None: only what `layers`
            names is claimed to be quantised.
        group: group size along K, None where the method has none.
        ignore: modules it claims to leave alone, patterns as written.
        layers: claims for single modules or patterns: (pattern, format name).
        activations: what is claimed of inputs: (pattern of `layers`, or "" for the algorithm; activations).
        kv_cache: format it claims for the key-value cache.
        packing: variant of the method that the tensors alone do not show (`gptq_v2`: zero points as they are).
        source: file and key, for messages.
    """

    method: str
    algorithm: str | None
    group: int | None
    ignore: tuple[str, ...]
    layers: tuple[tuple[str, str], ...] = ()
    activations: tuple[tuple[str, Activations], ...] = ()
    kv_cache: str | None = None
    packing: str | None = None
    source: str = "config.json: quantization_config"


@dataclass(frozen=True)
class ModelSpec:
    """A model, frozen.

    Attributes:
        family: our name for it (`mixtral`, `olmoe`, `qwen3_moe`, ...), the config's model_type where it has one.
        architecture: the config's `architectures[0]`.
        hidden, vocab: D, V.
        layers: the decoder layers in order.
        context: most positions (`max_position_embeddings`).
        norm_eps: RMS norm epsilon.
        norm_zero_centred: norms multiply by (1 + w).
        tied_embeddings: lm_head is the embedding.
        dtype: dtype the config declares for unquantised tensors ("bf16", "f16", "f32").
        prefix: what the text model's tensor names start with (`model.`, `model.language_model.`, ...).
        draft_layers: MTP layers the config declares.
        bos_ids, eos_ids: special tokens, union of config.json's and generation_config.json's.
        quant: the quantisation claim, None when there is none.
        vision: the vision tower, None when there is none or its shapes are not known.
    """

    family: str
    architecture: str
    hidden: int
    vocab: int
    layers: tuple[LayerSpec, ...]
    context: int
    norm_eps: float
    norm_zero_centred: bool
    tied_embeddings: bool
    dtype: Literal["bf16", "f16", "f32"]
    prefix: str
    draft_layers: int
    bos_ids: tuple[int, ...]
    eos_ids: tuple[int, ...]
    quant: QuantClaim | None
    vision: VisionSpec | None = None
