"""Loading: every dialect and every layout of experts to the same stacked matrices."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_files import (
    MIXTRAL,
    PROJ,
    QWEN3,
    STORED,
    W123,
    D,
    E,
    edit,
    encoded,
    expect_equal,
    gpt_oss_checkpoint,
    load_layer,
    moe_of,
    per_expert,
    plain_checkpoint,
    qwen_checkpoint,
    refusal,
    save,
    stacked,
    stacked_nvfp4_checkpoint,
)
from safetensors.torch import load_file
from torch import Tensor

from muster.checkpoint.loader import Loader
from muster.checkpoint.spec import MoESpec
from muster.checkpoint.storage import Layout, headers
from muster.formats.dialects import Dialect


@pytest.mark.parametrize("dialect", STORED, ids=lambda dialect: dialect.value)
def test_experts_of_every_dialect_stack_to_exactly_what_each_decodes_to(tmp_path: Path, dialect: Dialect) -> None:
    matrices = encoded(dialect)
    qwen_checkpoint(tmp_path, matrices, dialect)
    experts, accounting = load_layer(tmp_path)
    expect_equal(experts, matrices)
    assert accounting.consumed == len(load_file(tmp_path / "model.safetensors"))
    assert accounting.waived == {}


@pytest.mark.parametrize("dialect", [Dialect.MODELOPT_NVFP4, Dialect.CT_NVFP4], ids=lambda dialect: dialect.value)
def test_gate_and_up_keep_their_own_tensor_scales(tmp_path: Path, dialect: Dialect) -> None:
    matrices = encoded(dialect)
    experts, _ = load_layer(qwen_checkpoint(tmp_path, matrices, dialect))
    scale = experts.gate_up.global_scale
    assert scale is not None
    for expert in range(E):
        for piece, part in enumerate(("gate", "up")):
            own = matrices[expert, part].global_scale
            assert own is not None
            assert scale.value[expert, piece] == own.value.item()
    ratio = scale.value[:, 1] / scale.value[:, 0]
    assert bool(((ratio > 4) | (ratio < 1 / 4)).all())


def test_activation_scales_are_read_and_an_expert_without_one_has_nan(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)

    def add(tensors: dict[str, Tensor]) -> None:
        for expert in (0, 1, 3):
            for number, part in enumerate(PROJ.values()):
                tensors[f"model.layers.0.mlp.experts.{expert}.{part}.input_scale"] = torch.tensor(expert + number / 4)

    edit(tmp_path, add)
    experts, _ = load_layer(tmp_path)
    assert experts.gate_up.input_scale is not None
    assert experts.down.input_scale is not None
    nan = torch.nan
    torch.testing.assert_close(
        experts.gate_up.input_scale.value,
        torch.tensor([[0, 0.25], [1, 1.25], [nan, nan], [3, 3.25]]),
        rtol=0,
        atol=0,
        equal_nan=True,
    )


@pytest.mark.parametrize("dialect", [Dialect.PLAIN, Dialect.MODELOPT_NVFP4], ids=lambda dialect: dialect.value)
def test_mixtral_names_are_gate_up_and_down(tmp_path: Path, dialect: Dialect) -> None:
    matrices = encoded(dialect)
    tensors = per_expert(matrices, dialect, experts="block_sparse_moe.experts", names=W123)
    save(tmp_path, MIXTRAL, tensors | {"model.layers.0.block_sparse_moe.gate.weight": torch.ones(E, D)})
    expect_equal(load_layer(tmp_path)[0], matrices)


def test_stacked_experts_load_as_they_are(tmp_path: Path) -> None:
    matrices = encoded(Dialect.PLAIN)
    gate_up, down = (tensor.bfloat16() for tensor in stacked(matrices))
    router = torch.ones(E, D)
    tensors = {"mlp.experts.gate_up_proj": gate_up, "mlp.experts.down_proj": down, "mlp.gate.weight": router}
    save(tmp_path, QWEN3, {f"model.layers.0.{name}": tensor for name, tensor in tensors.items()})
    expect_equal(load_layer(tmp_path)[0], matrices)


@pytest.mark.parametrize("shape", [(E, 3), (3,)])
def test_stacked_scales_of_a_wrong_count_are_named(tmp_path: Path, shape: tuple[int, ...]) -> None:
    stacked_nvfp4_checkpoint(tmp_path, (E, 2))
    name = "model.layers.0.mlp.experts.gate_up_proj_scale_2"
    edit(tmp_path, lambda tensors: tensors.update({name: torch.ones(shape)}))
    message = refusal(tmp_path)
    assert "gate_up_proj" in message
    assert f"shape {list(shape)}" in message


@pytest.mark.parametrize("shape", [(E, 2), (2 * E,)])
def test_stacked_nvfp4_with_a_scale_per_gate_and_per_up_keeps_both(tmp_path: Path, shape: tuple[int, ...]) -> None:
    matrices = stacked_nvfp4_checkpoint(tmp_path, shape)
    expect_equal(load_layer(tmp_path)[0], matrices)


@pytest.mark.parametrize("quantised", [True, False])
def test_gpt_oss_rows_come_out_gate_first(tmp_path: Path, quantised: bool) -> None:
    matrices, biases = gpt_oss_checkpoint(tmp_path, quantised=quantised)
    experts, _ = load_layer(tmp_path)
    expect_equal(experts, matrices)
    assert experts.gate_up_bias is not None
    assert experts.down_bias is not None
    assert torch.equal(experts.gate_up_bias, torch.cat((biases["gate"], biases["up"]), dim=-1))
    assert torch.equal(experts.down_bias, biases["down"])


def test_the_router_comes_with_its_biases_in_stored_dtypes(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    bias = torch.randn(E, dtype=torch.float32)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.gate.e_score_correction_bias": bias}))
    loader = Loader.open(tmp_path)
    moe = moe_of(loader)
    moe = replace(moe, routing=replace(moe.routing, selection_bias=True))
    router = loader.router(0, moe)
    assert router.weight.dtype == torch.bfloat16
    assert router.bias is None
    assert router.selection_bias is not None
    assert torch.equal(router.selection_bias, bias)
    loader.experts(0, moe)
    loader.finish()


def transformers_model(family: str) -> Any:
    import transformers

    base = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "intermediate_size": 24,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 64,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    configs = {
        "mixtral": lambda: transformers.MixtralConfig(**base, num_local_experts=4),
        "olmoe": lambda: transformers.OlmoeConfig(**base, num_experts=4),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **base, num_experts=4, moe_intermediate_size=16, head_dim=8, mlp_only_layers=[1]
        ),
    }
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(configs[family](), dtype=torch.bfloat16)


@pytest.mark.parametrize("family", ["mixtral", "olmoe", "qwen3_moe"])
def test_what_transformers_saves_is_read_whole_and_bit_for_bit(tmp_path: Path, family: str) -> None:
    model = transformers_model(family)
    model.save_pretrained(tmp_path)
    state = model.state_dict()
    loader = Loader.open(tmp_path)
    names = loader.names
    hidden = loader.spec.hidden

    assert torch.equal(loader.embedding(), state["model.embed_tokens.weight"])
    assert torch.equal(loader.head().codes, state["lm_head.weight"])
    shapes = {header.name: header.shape for header in headers(loader.spec, Layout())}
    loader.tensor(f"{names.norm}.weight", (hidden,))
    for number, layer in enumerate(loader.spec.layers):
        if isinstance(layer.feed_forward, MoESpec):
            experts = loader.experts(number, layer.feed_forward)
            root = f"model.layers.{number}.mlp"
            assert torch.equal(experts.gate_up.codes, state[f"{root}.experts.gate_up_proj"])
            assert torch.equal(experts.down.codes, state[f"{root}.experts.down_proj"])
            assert torch.equal(loader.router(number, layer.feed_forward).weight, state[f"{root}.gate.weight"])
    for name, shape in shapes.items():
        if ".layers." in name and ".experts." not in name and "gate.weight" not in name:
            assert torch.equal(loader.tensor(name, shape), state[name])
    assert shapes == {name: entry.shape for name, entry in loader.index.tensors.items()}
    assert loader.finish().consumed == len(shapes)
