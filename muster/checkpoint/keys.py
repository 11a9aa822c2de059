"""Config keys that no family needs to read: which must keep a neutral value, and which are without effect."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

NEUTRAL: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "add_cross_attention": (False,),
        "attention_bias": (False,),
        "attention_multiplier": (1.0,),
        "attn_logit_softcapping": (),
        "attn_output_gate": (False,),
        "clip_qkv": (),
        "compression_config": (),
        "cross_attention_hidden_size": (),
        "decoder_sparse_step": (1,),
        "embedding_multiplier": (1.0,),
        "final_logit_softcapping": (),
        "first_k_dense_replace": (0,),
        "index_topk_pattern": (),
        "is_encoder_decoder": (False,),
        "logit_scale": (1.0,),
        "logits_scaling": (1.0,),
        "mlp_bias": (False,),
        "mlp_only_layers": ([],),
        "moe_layer_freq": (1,),
        "moe_router_dtype": ("float32",),
        "n_group": (1,),
        "n_shared_experts": (0,),
        "num_shared_experts": (0,),
        "output_gate_type": (),
        "partial_rotary_factor": (1.0,),
        "pruned_heads": ({},),
        "qkv_bias": (False,),
        "query_pre_attn_scalar": (),
        "residual_multiplier": (1.0,),
        "routed_scaling_factor": (1.0,),
        "shared_expert_intermediate_size": (0,),
        "shared_intermediate_size": (0,),
        "sliding_window": (),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (),
        "tie_encoder_decoder": (False,),
        "topk_group": (1,),
        "use_routing_bias": (False,),
        "use_sliding_window": (False,),
        "zero_expert_num": (0,),
    }
)
"""Keys that change the computation where a family knows them; elsewhere only these values (and null) are accepted."""

_WITHOUT_EFFECT = """
    transformers_version auto_map _name_or_path name_or_path _attn_implementation torchscript use_bfloat16 use_cache
    initializer_range attention_dropout hidden_dropout embd_pdrop resid_pdrop pretraining_tp ep_size
    output_router_logits router_aux_loss_coef aux_loss_alpha seq_aux router_jitter_noise max_window_layers
    output_attentions output_hidden_states output_scores return_dict return_dict_in_generate chunk_size_feed_forward
    is_decoder finetuning_task problem_type prefix task_specific_params tokenizer_class remove_invalid_values
    id2label label2id tf_legacy_loss ignore_index initial_context_length
    pad_token_id sep_token_id decoder_start_token_id forced_bos_token_id forced_eos_token_id bad_words_ids
    begin_suppress_tokens suppress_tokens do_sample early_stopping num_beams num_beam_groups diversity_penalty
    temperature top_k top_p typical_p repetition_penalty length_penalty no_repeat_ngram_size
    encoder_no_repeat_ngram_size exponential_decay_length_penalty max_length min_length num_return_sequences
    vision_config image_token_id video_token_id vision_start_token_id vision_end_token_id
    media_placeholder_token_id use_unified_vision_chunk video_placeholder projection_hidden_size
    projection_layer_norm_eps
"""

WAIVED = frozenset(_WITHOUT_EFFECT.split())
"""Keys without effect on the text model's computation: training, generation defaults, bookkeeping, vision."""

_QUANT_WITHOUT_EFFECT = """
    producer activation_scheme scale_fmt quantization_status global_compression_ratio version desc_act sym
    damp_percent true_sequential static_groups meta model_name_or_path model_file_base_name zero_point do_fuse
    fuse_max_seq_len modules_to_fuse exllama_config backend autoround_version block_name_to_quantize
    to_quant_block_names iters batch_size nsamples seqlen lr minmax_lr enable_quanted_input low_gpu_mem_usage dataset
    amp scale_dtype gradient_accumulate_steps enable_minmax_tuning
"""

QUANT_WAIVED = frozenset(_QUANT_WITHOUT_EFFECT.split())
"""Keys of `quantization_config` that say how weights were quantised, or what the tensors show themselves."""
