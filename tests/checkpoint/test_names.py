"""The name tables against published checkpoints, and names in messages."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.config import interpret
from muster.checkpoint.names import Names, grouped, layer_tensors, shown

COMMON: dict[str, Any] = {"rms_norm_eps": 1e-6, "hidden_act": "silu", "dtype": "bfloat16", "tie_word_embeddings": False}
LATENT: dict[str, Any] = {
    **COMMON,
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 8,
    "num_nextn_predict_layers": 1,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}
QWEN3_235B = {
    **COMMON,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "max_position_embeddings": 40960,
    "mlp_only_layers": [],
    "moe_intermediate_size": 1536,
    "norm_topk_prob": True,
    "num_attention_heads": 64,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 94,
    "num_key_value_heads": 4,
    "rope_theta": 1e6,
    "vocab_size": 151936,
}
GLM_5_1 = {
    **LATENT,
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "head_dim": 64,
    "hidden_size": 6144,
    "index_head_dim": 128,
    "index_n_heads": 32,
    "index_topk": 2048,
    "indexer_rope_interleave": True,
    "intermediate_size": 12288,
    "max_position_embeddings": 202752,
    "n_group": 1,
    "topk_group": 1,
    "num_attention_heads": 64,
    "num_hidden_layers": 78,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "qk_head_dim": 256,
    "qk_nope_head_dim": 192,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
    "v_head_dim": 256,
    "vocab_size": 154880,
}
DEEPSEEK_V3 = {
    **LATENT,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "max_position_embeddings": 163840,
    "n_group": 8,
    "topk_group": 4,
    "num_attention_heads": 128,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "rope_theta": 10000,
    "v_head_dim": 128,
    "vocab_size": 129280,
}
PUBLISHED = {
    "Qwen3-235B-A22B: all 36,945 tensors": (QWEN3_235B, 36_945),
    "GLM-5.1: 59,870 tensors less the draft layer's 791": (GLM_5_1, 59_870 - 791),
    "DeepSeek-V3: 91,991 tensors less the draft layer's 1,564 and a scale for each FP8 matrix": (
        DEEPSEEK_V3,
        91_991 - 1_564 - (3 * 8 + 58 * (5 + 3 + 3 * 256)),
    ),
}


@pytest.mark.parametrize("checkpoint", PUBLISHED)
def test_the_tables_name_as_many_tensors_as_the_published_checkpoint_has(checkpoint: str) -> None:
    config, tensors = PUBLISHED[checkpoint]
    names = Names(interpret(config).spec)
    every = {name for layer in range(len(names.spec.layers)) for name in layer_tensors(names, layer)}
    every |= {f"{module}.weight" for module in (names.embed, names.norm, names.head)}
    assert len(every) == tensors


def test_numbers_that_vary_together_become_ranges() -> None:
    names = [f"model.layers.{layer}.experts.{expert}.w" for layer in (0, 1, 2, 7) for expert in range(4)]
    assert grouped([*names, "model.norm"]) == ["model.layers.{0-2,7}.experts.{0-3}.w (16 tensors)", "model.norm"]


def test_numbers_that_do_not_vary_together_stay_apart() -> None:
    assert grouped(["l.0.e.0", "l.0.e.1", "l.1.e.1"]) == ["l.0.e.{0-1} (2 tensors)", "l.1.e.1"]


def expand(text: str) -> set[str]:
    """The names that one line of `grouped` stands for."""
    name = text.split(" (")[0]
    if "{" not in name:
        return {name}
    before, _, rest = name.partition("{")
    inside, _, after = rest.partition("}")
    runs = [run.split("-") for run in inside.split(",")]
    numbers = [n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]
    return {full for n in numbers for full in expand(f"{before}{n}{after}")}


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from("xy"))))
def test_grouping_leaves_nothing_out_and_adds_nothing(triples: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{a}.experts.{b}.{c}" for a, b, c in triples}
    lines = [expand(line) for line in grouped(names)]
    assert set().union(*lines) == names
    assert sum(map(len, lines)) == len(names)


def test_a_name_of_numbers_alone_is_no_trouble() -> None:
    name = "a" + ".1" * 5000
    assert grouped([name]) == [shown(name)]
    assert len(shown(name)) < 300
