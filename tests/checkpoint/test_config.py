from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from configs import NAMES, Config, config
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.config import interpret, read_config, read_spec
from muster.checkpoint.spec import (
    DenseSpec,
    GatedDelta,
    GroupedAttention,
    IndexerSpec,
    LatentAttention,
    ModelSpec,
    MoESpec,
    RopeSpec,
    RoutingSpec,
    SharedExpertSpec,
    YarnSpec,
)
from muster.errors import ConfigError, MusterError

SIGMOID = RoutingSpec(top_k=2, scoring="sigmoid", selection_bias=True, epsilon=1e-20)


def spec(name: str, **changes: Any) -> ModelSpec:
    return interpret(config(name, **changes)).spec


def refusal(made: Config, *fragments: str, **files: Any) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        interpret(made, **files)
    for fragment in fragments:
        assert fragment in str(caught.value)
    return caught.value


def moe(model: ModelSpec, layer: int = -1) -> MoESpec:
    feed_forward = model.layers[layer].feed_forward
    assert isinstance(feed_forward, MoESpec)
    return feed_forward


# Families


@pytest.mark.parametrize("name", NAMES)
def test_every_family_reads_without_unknown_keys(name: str) -> None:
    reading = interpret(config(name))
    assert reading.spec.family == name
    assert len(reading.spec.layers) == 4
    assert [note for note in reading.notes if "dtype" not in note] == []


def test_mixtral_is_grouped_attention_with_renormalised_softmax_routing() -> None:
    model = spec("mixtral")
    rope = RopeSpec(theta=1e6, width=16)
    assert model.layers[0].attention == GroupedAttention(heads=4, kv_heads=2, head_dim=16, rope=rope, scale=0.25)
    assert moe(model) == MoESpec(experts=8, inner=128, routing=RoutingSpec(top_k=2))
    assert (model.prefix, model.dtype, model.tied_embeddings, model.draft_layers) == ("model.", "bf16", False, 0)


def test_mixtral_sliding_window_is_honoured() -> None:
    attention = spec("mixtral", sliding_window=256).layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert attention.window == 256


def test_olmoe_norms_the_whole_projection_and_does_not_renormalise() -> None:
    model = spec("olmoe", clip_qkv=8.0)
    attention = model.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert (attention.qk_norm, attention.clip_qkv) == ("full", 8.0)
    assert moe(model).routing == RoutingSpec(top_k=4, renormalise=False)
    assert moe(model).inner == 32


def test_qwen3_moe_norms_heads_and_takes_head_dim_from_the_config() -> None:
    attention = spec("qwen3_moe").layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert (attention.head_dim, attention.qk_norm, attention.scale) == (32, "head", pytest.approx(32**-0.5))
    assert moe(spec("qwen3_moe")).inner == 48
    assert moe(spec("qwen3_moe", norm_topk_prob=False)).routing.renormalise is False


def test_qwen3_moe_dense_layers_follow_step_and_list() -> None:
    model = spec("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[3])
    kinds = [isinstance(layer.feed_forward, MoESpec) for layer in model.layers]
    assert kinds == [False, True, False, False]
    assert model.layers[0].feed_forward == DenseSpec(192)


@pytest.mark.parametrize(("name", "fused"), [("qwen3_next", True), ("qwen3_5_moe", False), ("qwen3_5_moe_text", False)])
def test_hybrids_alternate_gated_delta_and_gated_attention(name: str, fused: bool) -> None:
    model = spec(name)
    delta = GatedDelta(key_heads=2, value_heads=4, key_dim=16, value_dim=16, kernel=4, state_dtype="f32", fused=fused)
    full = model.layers[3].attention
    assert [layer.attention for layer in model.layers[:3]] == [delta] * 3
    assert isinstance(full, GroupedAttention)
    assert (full.output_gate, full.qk_norm, full.rope) == (True, "head", RopeSpec(theta=1e7, width=8))
    assert moe(model).shared == SharedExpertSpec(48, gated=True)
    assert moe(model).routing == RoutingSpec(top_k=3)
    assert model.norm_zero_centred


def test_qwen3_5_wrapper_has_its_own_prefix_and_draft_layer() -> None:
    assert (spec("qwen3_5_moe").prefix, spec("qwen3_5_moe").draft_layers) == ("model.language_model.", 1)
    assert spec("qwen3_5_moe_text").prefix == "model."


def test_hybrid_layers_can_come_from_the_list_or_the_interval_alone() -> None:
    assert spec("qwen3_5_moe", full_attention_interval=...).layers == spec("qwen3_5_moe", layer_types=...).layers


def test_glm4_rotates_half_the_head_and_has_no_output_bias() -> None:
    model = spec("glm4_moe")
    attention = model.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert attention.rope == RopeSpec(theta=1e6, width=16)
    assert (attention.qkv_bias, attention.output_bias, attention.qk_norm) == (True, False, "head")
    assert spec("glm4_moe", use_qk_norm=False).layers[0].attention != attention
    assert moe(model).shared == SharedExpertSpec(32)
    assert isinstance(model.layers[0].feed_forward, DenseSpec)
    assert model.eos_ids == (2, 3, 4)


def test_glm_dsa_shares_indexers() -> None:
    model = spec("glm_moe_dsa")
    indexers = [layer.attention.indexer for layer in model.layers if isinstance(layer.attention, LatentAttention)]
    full = IndexerSpec(heads=4, head_dim=16, top_k=64, rope_interleaved=True)
    assert indexers[0] == full
    assert [indexer.shared for indexer in indexers if indexer] == [False, True, False, True]
    assert spec("glm_moe_dsa", indexer_types=...).layers == model.layers
    assert spec("glm_moe_dsa", index_topk_freq=..., index_skip_topk_offset=...).layers == model.layers


def test_published_index_sharing_rule_gives_21_full_layers_of_78() -> None:
    changes: Config = dict.fromkeys(("indexer_types", "mlp_layer_types", "layer_types"), ...)
    model = spec("glm_moe_dsa", **changes, num_hidden_layers=78, index_topk_freq=4, index_skip_topk_offset=3)
    attentions = [layer.attention for layer in model.layers]
    full = [
        i for i, a in enumerate(attentions) if isinstance(a, LatentAttention) and a.indexer and not a.indexer.shared
    ]
    assert full == [0, 1, *range(2, 78, 4)]


def test_deepseek_v32_indexer_rotates_halves_while_the_layer_interleaves() -> None:
    attention = spec("deepseek_v32").layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert attention.indexer is not None
    assert (attention.rope.interleaved, attention.indexer.rope_interleaved) == (True, False)


def test_deepseek_routes_by_groups_with_a_selection_bias() -> None:
    rule = moe(spec("deepseek_v3")).routing
    assert rule == RoutingSpec(
        top_k=2,
        scoring="sigmoid",
        selection_bias=True,
        groups=4,
        groups_kept=2,
        scaling_factor=2.5,
        epsilon=1e-20,
    )


@pytest.mark.parametrize(("name", "scale"), [("deepseek_v3", 0.135234), ("kimi_k2", 0.130861), ("kimi_k25", 0.144680)])
def test_latent_softmax_scale_includes_yarn(name: str, scale: float) -> None:
    attention = spec(name, qk_nope_head_dim=128, qk_rope_head_dim=64).layers[0].attention
    assert isinstance(attention, LatentAttention)
    assert attention.scale == pytest.approx(scale, abs=5e-7)
    assert attention.rope.yarn is not None
    assert attention.rope.yarn.attention_factor == 1.0


def test_kimi_k25_text_keys_are_nested() -> None:
    model = spec("kimi_k25")
    assert (model.prefix, model.draft_layers, model.vocab) == ("language_model.model.", 0, 512)


def test_gpt_oss_has_sinks_windows_biases_and_softmax_after_top_k() -> None:
    model = spec("gpt_oss")
    windows = [a.window for a in (layer.attention for layer in model.layers) if isinstance(a, GroupedAttention)]
    assert windows == [128, None, 128, None]
    attention = model.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert (attention.sinks, attention.qkv_bias, attention.output_bias, attention.scale) == (True, True, True, 0.25)
    assert attention.rope.yarn == YarnSpec(32.0, 4096, truncate=False, attention_factor=0.1 * math.log(32) + 1)
    assert moe(model).routing == RoutingSpec(top_k=4, softmax_after_top_k=True, gate_bias=True)
    assert (moe(model).activation, moe(model).limit, moe(model).bias) == ("swiglu-oai", 7.0, True)


def test_minimax_norms_the_whole_projection_and_declares_three_drafts() -> None:
    model = spec("minimax_m2")
    attention = model.layers[0].attention
    assert isinstance(attention, GroupedAttention)
    assert (attention.qk_norm, attention.rope.width) == ("full", 16)
    assert moe(model).routing == SIGMOID
    assert model.draft_layers == 3
    assert spec("minimax_m2", rotary_dim=..., partial_rotary_factor=0.5).layers == model.layers


@pytest.mark.parametrize(
    "model_type",
    ["mixtral", "olmoe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "glm_moe_dsa", "deepseek_v3", "gpt_oss"],
)
def test_what_transformers_writes_is_read(model_type: str, tmp_path: Path) -> None:
    from transformers import AutoConfig

    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    written = written.get("text_config", written)
    reading = read_config(tmp_path)
    assert len(reading.spec.layers) == written["num_hidden_layers"]
    assert reading.spec.hidden == written["hidden_size"]
    assert [note for note in reading.notes if "dtype" not in note] == []


# Dialects


def test_both_rope_spellings_give_one_spec() -> None:
    yarn = {**config("deepseek_v3")["rope_scaling"], "rope_theta": 10000}
    yarn["rope_type"] = yarn.pop("type")
    assert spec("deepseek_v3", rope_theta=..., rope_scaling=..., rope_parameters=yarn) == spec("deepseek_v3")


@pytest.mark.parametrize("key", ["num_experts", "num_local_experts", "n_routed_experts"])
@pytest.mark.parametrize("top_k", ["num_experts_per_tok", "experts_per_token", "moe_top_k"])
def test_all_names_of_expert_count_and_top_k(key: str, top_k: str) -> None:
    changes: Config = {"num_local_experts": ..., "num_experts_per_tok": ...}
    assert spec("mixtral", **{**changes, key: 8, top_k: 2}) == spec("mixtral")


@pytest.mark.parametrize(("dtype", "ours"), [("bfloat16", "bf16"), ("float16", "f16"), ("float32", "f32")])
def test_dtype_has_two_names(dtype: str, ours: str) -> None:
    assert spec("mixtral", torch_dtype=..., dtype=dtype).dtype == ours
    assert spec("mixtral", torch_dtype=dtype).dtype == ours


def test_unstated_dtype_is_noted() -> None:
    assert any("dtype" in note for note in interpret(config("gpt_oss")).notes)


def test_special_tokens_are_a_union_of_all_files() -> None:
    model = interpret(config("mixtral"), generation={"eos_token_id": [2, 7], "bos_token_id": 1}).spec
    assert (model.bos_ids, model.eos_ids) == ((1,), (2, 7))


def test_architecture_or_model_type_alone_is_enough() -> None:
    assert spec("mixtral", architectures=...).architecture == "MixtralForCausalLM"
    assert spec("mixtral", model_type=...).family == "mixtral"


def test_unknown_keys_are_noted_with_their_place_and_value() -> None:
    made = config("deepseek_v3", surprising_key=7)
    made["rope_scaling"]["odd"] = True
    notes = interpret(made).notes
    assert len(notes) == 2
    assert any("surprising_key = 7" in note for note in notes)
    assert any("rope_scaling.odd = true" in note for note in notes)


# Contradictions


@pytest.mark.parametrize(
    ("name", "changes", "fragments"),
    [
        ("qwen3_moe", {"num_local_experts": 64}, ["num_experts", "8", "num_local_experts", "64"]),
        ("gpt_oss", {"experts_per_token": 2}, ["experts_per_token", "2", "num_experts_per_tok", "4"]),
        ("mixtral", {"rope_parameters": {"rope_theta": 5.0}}, ["rope_parameters.rope_theta", "5.0", "1000000.0"]),
        ("deepseek_v3", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000}}, ["rope_type", "yarn"]),
        ("mixtral", {"dtype": "float16"}, ["dtype", "float16", "torch_dtype", "bfloat16"]),
        ("qwen3_5_moe", {"num_hidden_layers": 8}, ["layer_types", "4 entries", "num_hidden_layers 8"]),
        ("qwen3_5_moe", {"full_attention_interval": 2}, ["layer_types", "full_attention_interval 2", "layer 1"]),
        ("glm_moe_dsa", {"indexer_types": ["full"] * 4}, ["indexer_types", "index_topk_freq 2", "layer 1"]),
        ("glm_moe_dsa", {"first_k_dense_replace": 2}, ["mlp_layer_types", "first_k_dense_replace 2", "layer 1"]),
        ("mixtral", {"num_attention_heads": 3, "num_key_value_heads": 1}, ["head_dim", "hidden_size 64", "3"]),
        ("mixtral", {"num_experts_per_tok": 9}, ["num_experts_per_tok", "9 of 8"]),
        ("deepseek_v3", {"n_group": 3}, ["n_group", "3", "8 experts"]),
        ("deepseek_v3", {"topk_group": 5}, ["topk_group", "5", "n_group 4"]),
        ("deepseek_v3", {"topk_group": 1, "num_experts_per_tok": 3}, ["topk_group", "1 groups of 2", "top-k 3"]),
        ("mixtral", {"num_key_value_heads": 3}, ["num_attention_heads", "4", "num_key_value_heads 3"]),
        ("qwen3_moe", {"mlp_only_layers": [9]}, ["mlp_only_layers", "9", "num_hidden_layers 4"]),
        ("minimax_m2", {"partial_rotary_factor": 0.25}, ["rotary_dim", "16", "partial_rotary_factor 0.25"]),
        ("glm_moe_dsa", {"qk_head_dim": 32}, ["qk_head_dim", "32", "16", "8"]),
        ("gpt_oss", {"initial_context_length": 8192}, ["initial_context_length", "8192", "4096"]),
        ("qwen3_next", {"linear_num_value_heads": 3}, ["linear_num_value_heads", "3", "linear_num_key_heads 2"]),
        ("glm_moe_dsa", {"index_skip_topk_offset": ...}, ["index_topk_freq", "index_skip_topk_offset"]),
    ],
)
def test_contradictions_name_both_places_and_values(name: str, changes: Config, fragments: list[str]) -> None:
    refusal(config(name, **changes), *fragments)


def test_architecture_and_model_type_must_agree() -> None:
    refusal(config("mixtral", model_type="olmoe"), "MixtralForCausalLM", "olmoe", "OlmoeForCausalLM")


def test_all_problems_of_a_config_come_at_once() -> None:
    error = refusal(config("mixtral", hidden_size="64", num_experts_per_tok=9, rms_norm_eps=..., rope_theta=-1.0))
    assert len(error.reasons) == 4


def test_a_broken_key_causes_no_second_complaint() -> None:
    assert len(refusal(config("mixtral", num_local_experts=...)).reasons) == 1
    assert len(refusal(config("mixtral", num_hidden_layers="many")).reasons) == 1


# What is not implemented is refused


@pytest.mark.parametrize(
    ("name", "changes", "key"),
    [
        ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.type"),
        ("mixtral", {"rope_scaling": {"factor": 2.0}}, "rope_type"),
        ("mixtral", {"rope_scaling": {"type": "default", "factor": 2.0}}, "rope_scaling.factor"),
        ("mixtral", {"hidden_act": "gelu"}, "hidden_act"),
        ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("mixtral", {"attention_bias": True}, "attention_bias"),
        ("mixtral", {"final_logit_softcapping": 30.0}, "final_logit_softcapping"),
        ("mixtral", {"is_encoder_decoder": True}, "is_encoder_decoder"),
        ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window"),
        ("qwen3_moe", {"shared_expert_intermediate_size": 32}, "shared_expert_intermediate_size"),
        ("qwen3_moe", {"use_qk_norm": False}, "use_qk_norm"),
        ("olmoe", {"sliding_window": 128}, "sliding_window"),
        ("qwen3_5_moe", {"norm_topk_prob": False}, "text_config.norm_topk_prob"),
        ("qwen3_5_moe", {"mtp_use_dedicated_embeddings": True}, "mtp_use_dedicated_embeddings"),
        ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func"),
        ("deepseek_v3", {"topk_method": "greedy"}, "topk_method"),
        ("deepseek_v3", {"attention_bias": True}, "attention_bias"),
        ("deepseek_v3", {"q_lora_rank": None}, "q_lora_rank"),
        ("glm_moe_dsa", {"moe_router_dtype": "bfloat16"}, "moe_router_dtype"),
        ("glm_moe_dsa", {"index_topk_pattern": "FSFS"}, "index_topk_pattern"),
        ("minimax_m2", {"qk_norm_type": "per_head"}, "qk_norm_type"),
        ("minimax_m2", {"attn_type_list": [1, 0, 1, 1]}, "attn_type_list"),
        ("minimax_m2", {"shared_intermediate_size": 64}, "shared_intermediate_size"),
    ],
)
def test_what_would_change_the_computation_is_refused(name: str, changes: Config, key: str) -> None:
    refusal(config(name, **changes), key)


def test_gelu_in_tanh_form_is_honoured() -> None:
    assert moe(spec("mixtral", hidden_act="gelu_pytorch_tanh")).activation == "gelu"


# Bad input


@pytest.mark.parametrize("name", NAMES)
def test_missing_keys_are_named_with_file_and_family(name: str) -> None:
    refusal(config(name, hidden_size=...), "config.json", "hidden_size", name, "nothing")


@pytest.mark.parametrize("value", ["64", 64.5, -1, 0, True, [], {}, 10**30, math.nan])
def test_wrong_types_are_named(value: object) -> None:
    refusal(config("mixtral", hidden_size=value), "hidden_size", "a whole number of at least 1")


def test_unknown_architecture_lists_the_supported_ones() -> None:
    error = refusal(config("mixtral", architectures=["LlamaForCausalLM"]), "LlamaForCausalLM")
    for name in ("MixtralForCausalLM", "Qwen3_5MoeForConditionalGeneration", "KimiK25ForConditionalGeneration"):
        assert name in error.expected


@pytest.mark.parametrize(
    ("text", "fragment"),
    [
        ("{", "line 1, column 2"),
        ("[1]", "a JSON object"),
        ('{"a": 1,\n "a": 2}', "key a"),
        ("", "valid JSON"),
        ("version https://git-lfs.github.com/spec/v1", "Git-LFS"),
        ("[" * 100_000, "valid JSON"),
        ('{"a": ' + "1" * 5000 + "}", "valid JSON"),
    ],
)
def test_files_that_are_no_json_object(tmp_path: Path, text: str, fragment: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_spec(tmp_path)
    assert fragment in str(caught.value)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(b'{"a": "\xff"}')
    with pytest.raises(ConfigError, match="UTF-8"):
        read_spec(tmp_path)


def test_no_directory_and_no_config_are_different_errors(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a checkpoint directory"):
        read_spec(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"a config\.json"):
        read_spec(tmp_path)


def test_a_lone_file_and_a_directory_give_the_same_spec(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral")))
    assert read_spec(tmp_path / "config.json") == read_spec(tmp_path) == spec("mixtral")


def test_neighbours_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config("mixtral")))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5]}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    model = read_spec(tmp_path)
    assert model.eos_ids == (2, 5)
    assert model.quant is not None
    assert model.quant.algorithm == "nvfp4"


# Fuzz

_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-2, 8),
    st.floats(),
    st.text(max_size=5),
    st.sampled_from(["yarn", "full_attention", "sparse", "shared", "float16", "re:(", "-:x"]),
    st.lists(st.one_of(st.integers(-1, 9), st.text(max_size=3), st.none()), max_size=4),
    st.dictionaries(st.sampled_from(["factor", "rope_type", "num_bits", "x"]), st.integers(-1, 64), max_size=3),
)

_QUANT: Config = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    "quantized_layers": {"a.b": {"quant_algo": "FP8"}},
    "extra_config": {"a": {"bits": 16}},
    "dynamic": {"-:a": {}},
    "weight_block_size": [128, 128],
    "bits": 4,
    "group_size": 128,
    "quant_algo": "MIXED_PRECISION",
}
_METHODS = ["modelopt", "compressed-tensors", "fp8", "mxfp4", "gptq", "awq", "auto-round"]


def _places(value: object, place: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    here = [place] if place else []
    return here + [p for k, v in value.items() for p in _places(v, (*place, k))] if isinstance(value, dict) else here


def _mutated(made: Config, data: st.DataObject, times: int) -> Config:
    made = copy.deepcopy(made)
    for _ in range(times):
        *parents, last = data.draw(st.sampled_from(_places(made) or [("x",)]))
        holder = made
        for parent in parents:
            holder = holder[parent]
        if data.draw(st.booleans()):
            holder[last] = data.draw(_VALUES)
        else:
            holder.pop(last, None)
    return made


@settings(max_examples=400, deadline=None)
@given(data=st.data(), name=st.sampled_from(NAMES), times=st.integers(1, 4))
def test_any_config_gives_an_answer_or_a_muster_error(data: st.DataObject, name: str, times: int) -> None:
    made = config(name)
    if data.draw(st.booleans()):
        made["quantization_config"] = {**_QUANT, "quant_method": data.draw(st.sampled_from(_METHODS))}
    made = _mutated(made, data, times)
    beside = _mutated({"quantization": {**_QUANT}}, data, 1) if data.draw(st.booleans()) else None
    try:
        reading = interpret(made, beside, {"eos_token_id": data.draw(_VALUES)})
    except MusterError:
        return
    assert reading.spec.layers
