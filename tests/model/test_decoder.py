"""The decoders against transformers, on tiny random weights: every family and every routing option it uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from muster.device import cpu
from muster.model.choosing import unproven
from muster.model.decoder import Decoder
from muster.model.families import load
from muster.plan import Role

from .oracle import Driver, chunked, error, make, save, tokens, truth

LIMIT = 1e-5

OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("mixtral", {}),
    "mixtral-all-experts": ("mixtral", {"num_experts_per_tok": 6}),
    "mixtral-one-expert": ("mixtral", {"num_experts_per_tok": 1}),
    "mixtral-window": ("mixtral", {"sliding_window": 7}),
    "mixtral-head-dim": ("mixtral", {"head_dim": 24}),
    "mixtral-tied": ("mixtral", {"tie_word_embeddings": True}),
    "mixtral-rope": ("mixtral", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "olmoe": ("olmoe", {}),
    "olmoe-renormalised": ("olmoe", {"norm_topk_prob": True}),
    "olmoe-clipped": ("olmoe", {"clip_qkv": 0.8}),
    "olmoe-multi-head": ("olmoe", {"num_key_value_heads": 4}),
    "olmoe-biases": ("olmoe", {"attention_bias": True}),
    "olmoe-all-experts": ("olmoe", {"num_experts_per_tok": 6}),
    "qwen3": ("qwen3_moe", {"norm_topk_prob": True}),
    "qwen3-not-renormalised": ("qwen3_moe", {}),
    "qwen3-dense-layers": ("qwen3_moe", {"mlp_only_layers": [1]}),
    "qwen3-sparse-step": ("qwen3_moe", {"decoder_sparse_step": 2}),
    "qwen3-tied": ("qwen3_moe", {"tie_word_embeddings": True}),
    "qwen3-biases": ("qwen3_moe", {"attention_bias": True}),
    "qwen3-gelu": ("qwen3_moe", {"hidden_act": "gelu_pytorch_tanh", "mlp_only_layers": [0]}),
    "qwen3-rope": ("qwen3_moe", {"rope_parameters": {"rope_type": "default", "rope_theta": 700.0}}),
    "qwen3-yarn": (
        "qwen3_moe",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10_000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
}


VISIBLE = {"num_experts_per_tok", "sliding_window", "rope_parameters", "norm_topk_prob", "clip_qkv", "mlp_only_layers"}
"""Options that change the result of the same weights."""


def pair(name: str, directory: Path, **more: Any) -> tuple[PreTrainedModel, Decoder]:
    family, options = OPTIONS[name]
    model = make(family, **{**options, **more})
    return model, load(save(model, directory))


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_equal_transformers_however_the_sequence_is_cut(name: str, tmp_path: Path) -> None:
    model, decoder = pair(name, tmp_path)
    ids = tokens(29)
    wanted = truth(model, ids)
    for chunks in ([29], [11, 1, 17], [1] * 29):
        assert error(chunked(decoder, ids, chunks), wanted) < LIMIT, chunks


@pytest.mark.parametrize("name", ["mixtral-window", "olmoe-clipped", "qwen3-dense-layers"])
def test_a_mixed_batch_gives_each_sequence_its_own_logits(name: str, tmp_path: Path) -> None:
    model, decoder = pair(name, tmp_path)
    first, second, third = tokens(20, 1), tokens(13, 2), tokens(17, 3)
    driver = Driver(decoder)
    driver.step({1: first[:19], 2: second[:4]})
    got = driver.step({1: first[19:], 3: third, 2: second[4:]})
    wanted = torch.cat((truth(model, first)[19:], truth(model, third), truth(model, second)[4:]))
    assert error(got, wanted) < LIMIT


@pytest.mark.parametrize("name", [name for name, (_, options) in OPTIONS.items() if options.keys() & VISIBLE])
def test_the_option_shows_in_the_logits(name: str) -> None:
    family, options = OPTIONS[name]
    ids = tokens(29)
    assert error(truth(make(family, **options), ids), truth(make(family), ids)) > 1e-3


def test_rows_pick_which_tokens_get_logits(tmp_path: Path) -> None:
    _, decoder = pair("qwen3", tmp_path)
    ids = tokens(9)
    assert error(Driver(decoder).step({0: ids}, rows=[8, 2]), Driver(decoder).step({0: ids})[[8, 2]]) < 1e-6
    assert Driver(decoder).step({0: ids}, rows=[]).shape == (0, 131)


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3"])
def test_every_expert_shows_in_the_logits(name: str, tmp_path: Path) -> None:
    model, decoder = pair(name, tmp_path)
    ids = tokens(48)
    right = chunked(decoder, ids, [48])
    for expert in range(6):
        with torch.no_grad():
            down = model.model.layers[1].mlp.experts.down_proj
            kept = down[expert].clone()
            down[expert] = down[expert].roll(1, 0)
        assert error(truth(model, ids), right) > 1e-2, f"expert {expert}"
        with torch.no_grad():
            down[expert] = kept


@pytest.mark.parametrize("name", ["mixtral", "olmoe", "qwen3-tied"])
def test_bf16_checkpoints_are_computed_in_float32(name: str, tmp_path: Path) -> None:
    family, options = OPTIONS[name]
    model = make(family, stored=torch.bfloat16, **options)
    decoder = load(save(model, tmp_path, torch.bfloat16))
    ids = tokens(21)
    assert error(chunked(decoder, ids, [12, 9]), truth(model, ids)) < LIMIT


@pytest.mark.parametrize("backend", ["torch", "cpu"])
def test_the_requested_expert_backend_is_the_one_that_runs(backend: str, tmp_path: Path) -> None:
    model = make("mixtral", stored=torch.bfloat16, intermediate_size=128)
    decoder = load(save(model, tmp_path, torch.bfloat16), choose=unproven(cpu(), backend))
    assert backend in decoder.plan.backends(Role.EXPERTS)
    ids = tokens(11)
    assert error(chunked(decoder, ids, [8, 1, 2]), truth(model, ids)) < LIMIT


def test_tied_embeddings_are_kept_once(tmp_path: Path) -> None:
    sizes = {}
    for tied in (False, True):
        model = make("mixtral", tie_word_embeddings=tied)
        sizes[tied] = load(save(model, tmp_path / str(tied), torch.bfloat16)).weight_bytes
    assert sizes[False] - sizes[True] == 131 * 64 * 2


def test_the_cache_has_one_pair_of_pages_per_layer(tmp_path: Path) -> None:
    _, decoder = pair("qwen3", tmp_path)
    cache = decoder.new_cache(5, 8)
    assert len(cache) == 3
    for pages in cache:
        assert pages.key_PSMH.shape == pages.value_PSMH.shape == (5, 8, 2, 32)
        assert pages.key_PSMH.dtype == torch.float32


def test_loading_reports_progress_up_to_all_bytes(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(save(make("olmoe"), tmp_path), progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert len(seen) > 3
    assert seen[-1][0] <= seen[-1][1]
