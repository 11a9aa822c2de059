"""Small configs of every family, with the structure-bearing keys that published ones have."""

from __future__ import annotations

import copy
from typing import Any

Config = dict[str, Any]

_COMMON: Config = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.02,
    "use_cache": True,
    "transformers_version": "4.51.0",
}

_LATENT: Config = {
    **_COMMON,
    "attention_bias": False,
    "first_k_dense_replace": 1,
    "intermediate_size": 96,
    "kv_lora_rank": 16,
    "moe_intermediate_size": 32,
    "moe_layer_freq": 1,
    "n_group": 1,
    "topk_group": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_experts_per_tok": 2,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

_YARN: Config = {
    "type": "yarn",
    "factor": 40,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

_INDEXER: Config = {"index_head_dim": 16, "index_n_heads": 4, "index_topk": 64}

_HYBRID: Config = {
    **_COMMON,
    "attention_bias": False,
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "num_experts": 16,
    "num_experts_per_tok": 3,
    "full_attention_interval": 4,
}

_QWEN35_TEXT: Config = {
    **{key: value for key, value in _HYBRID.items() if key not in ("torch_dtype", "bos_token_id")},
    "dtype": "bfloat16",
    "model_type": "qwen3_5_moe_text",
    "attn_output_gate": True,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "mamba_ssm_dtype": "float32",
    "mlp_only_layers": [],
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
    },
}

_KIMI_TEXT: Config = {
    **_LATENT,
    "model_type": "kimi_k2",
    "rope_theta": 50000.0,
    "rope_scaling": {**_YARN, "factor": 64.0},
}

_CONFIGS: dict[str, Config] = {
    "mixtral": {
        **_COMMON,
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "sliding_window": None,
    },
    "olmoe": {
        **_COMMON,
        "architectures": ["OlmoeForCausalLM"],
        "model_type": "olmoe",
        "num_key_value_heads": 4,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
        "clip_qkv": None,
        "rope_theta": 10000.0,
        "rope_scaling": None,
    },
    "qwen3_moe": {
        **_COMMON,
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "attention_bias": False,
        "decoder_sparse_step": 1,
        "head_dim": 32,
        "intermediate_size": 192,
        "mlp_only_layers": [],
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": None,
        "use_sliding_window": False,
        "max_window_layers": 4,
    },
    "qwen3_next": {
        **_HYBRID,
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "decoder_sparse_step": 1,
        "intermediate_size": 80,
        "norm_topk_prob": True,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_scaling": None,
    },
    "qwen3_5_moe": {
        "architectures": ["Qwen3_5MoeForConditionalGeneration"],
        "model_type": "qwen3_5_moe",
        "image_token_id": 500,
        "tie_word_embeddings": False,
        "text_config": _QWEN35_TEXT,
        "vision_config": {"depth": 27},
    },
    "qwen3_5_moe_text": {**_QWEN35_TEXT, "architectures": ["Qwen3_5MoeForCausalLM"]},
    "glm4_moe": {
        **{key: value for key, value in _LATENT.items() if "lora" not in key and not key.startswith(("qk_", "v_head"))},
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "attention_bias": True,
        "head_dim": 32,
        "num_key_value_heads": 2,
        "partial_rotary_factor": 0.5,
        "rope_theta": 1000000,
        "use_qk_norm": True,
        "eos_token_id": [2, 3, 4],
    },
    "glm_moe_dsa": {
        **_LATENT,
        **_INDEXER,
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "head_dim": 8,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "qk_head_dim": 24,
        "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"},
        "index_topk_freq": 2,
        "index_skip_topk_offset": 1,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_types": ["full", "shared", "full", "shared"],
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "layer_types": ["deepseek_sparse_attention"] * 4,
        "moe_router_dtype": "float32",
        "mlp_bias": False,
        "num_experts": 8,
    },
    "deepseek_v3": {
        **_LATENT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "n_group": 4,
        "topk_group": 2,
        "rope_theta": 10000,
        "rope_scaling": _YARN,
    },
    "deepseek_v32": {
        **_LATENT,
        **_INDEXER,
        "architectures": ["DeepseekV32ForCausalLM"],
        "model_type": "deepseek_v32",
        "rope_theta": 10000,
        "rope_scaling": _YARN,
    },
    "kimi_k2": {
        **_KIMI_TEXT,
        "architectures": ["DeepseekV3ForCausalLM"],
        "num_nextn_predict_layers": 0,
        "rope_scaling": {**_YARN, "factor": 32.0, "beta_fast": 1.0},
    },
    "kimi_k25": {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
        "text_config": {**_KIMI_TEXT, "architectures": ["DeepseekV3ForCausalLM"], "num_nextn_predict_layers": 0},
    },
    "gpt_oss": {
        **{key: value for key, value in _COMMON.items() if key != "torch_dtype"},
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "attention_bias": True,
        "experts_per_token": 4,
        "num_experts_per_tok": 4,
        "head_dim": 16,
        "initial_context_length": 4096,
        "intermediate_size": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_local_experts": 8,
        "rope_theta": 150000,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        "sliding_window": 128,
        "swiglu_limit": 7.0,
    },
    "minimax_m2": {
        **{key: value for key, value in _COMMON.items() if key != "torch_dtype"},
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "head_dim": 32,
        "intermediate_size": 48,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "rope_theta": 5000000,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "qk_norm_type": "per_layer",
        "use_routing_bias": True,
        "use_mtp": True,
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "shared_intermediate_size": 0,
    },
}

NAMES = tuple(_CONFIGS)


def config(name: str, **changes: Any) -> Config:
    """A family's config with some keys of the text model changed; a value of `...` removes the key."""
    made = copy.deepcopy(_CONFIGS[name])
    text = made.get("text_config", made)
    text.update(changes)
    for key in [key for key, value in changes.items() if value is ...]:
        del text[key]
    return made
