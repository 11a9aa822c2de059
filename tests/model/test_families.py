"""Loading: which architectures run, and that every tensor is accounted for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GptOssConfig

from muster.device import cpu
from muster.errors import CheckpointError, ConfigError, UsageError
from muster.model.choosing import unproven
from muster.model.families import FAMILIES, load

from .oracle import make, save


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
    return directory


MISSING = {
    "mixtral": ["model.layers.1.block_sparse_moe.experts.3.w2.weight", "model.layers.2.self_attn.k_proj.weight"],
    "olmoe": ["model.layers.0.self_attn.q_norm.weight", "model.norm.weight"],
    "qwen3_moe": ["model.layers.2.mlp.gate.weight", "lm_head.weight"],
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_missing_and_every_extra_tensor_is_named_in_one_error(family: str, tmp_path: Path) -> None:
    extra = ["model.layers.1.self_attn.q_proj.bias", "model.layers.7.input_layernorm.weight"]

    def damage(tensors: dict[str, Tensor]) -> None:
        for name in MISSING[family]:
            del tensors[name]
        tensors |= {name: torch.zeros(64) for name in extra}

    directory = edit(save(make(family), tmp_path), damage)
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    for name in (*MISSING[family], *extra):
        assert name in str(caught.value)
    assert len(caught.value.reasons) == len(MISSING[family]) + len(extra)


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.o_proj.weight"
    directory = edit(save(make("mixtral"), tmp_path), lambda tensors: tensors.update({name: torch.zeros(64, 32)}))
    with pytest.raises(CheckpointError) as caught:
        load(directory)
    assert "model.layers.0.self_attn.o_proj" in str(caught.value)
    assert "64, 32" in str(caught.value)
    assert "64, 64" in str(caught.value)


def test_an_architecture_that_only_can_be_inspected_is_refused_with_what_runs(tmp_path: Path) -> None:
    GptOssConfig(
        architectures=["GptOssForCausalLM"],
        num_hidden_layers=2,
        hidden_size=64,
        head_dim=16,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=64,
        num_local_experts=4,
    ).save_pretrained(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load(tmp_path)
    assert "gpt_oss" in str(caught.value)
    assert "mixtral, olmoe, qwen3_moe" in str(caught.value)


def test_an_unknown_expert_backend_is_refused_with_those_there_are(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="torch"):
        load(save(make("mixtral"), tmp_path), choose=unproven(cpu(), "no-such"))


def test_the_family_file_in_the_docs_is_the_one_that_runs() -> None:
    root = Path(__file__).parents[2]
    assert (root / "muster/model/olmoe.py").read_text() in (root / "docs/adding-a-model.md").read_text()
