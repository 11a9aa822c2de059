"""Loading: every layout to the same stacked experts, and the books that must balance."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muster.checkpoint.loader import Accounting, ExpertTensors, Loader
from muster.checkpoint.names import Names, layer_tensors
from muster.checkpoint.spec import MoESpec
from muster.errors import CheckpointError, MusterError
from muster.formats.codec import decode, encode
from muster.formats.dialects import Dialect, write
from muster.formats.matrix import Meaning, QuantMatrix
from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, Format, int4

D, F, E, V = 128, 128, 4, 64

MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": D,
    "intermediate_size": F,
    "num_local_experts": E,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": V,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e4,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
QWEN3 = {
    **{key: value for key, value in MIXTRAL.items() if key not in ("num_local_experts", "intermediate_size")},
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": E,
    "moe_intermediate_size": F,
    "intermediate_size": F,
    "head_dim": 64,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
GPT_OSS = {
    **{key: value for key, value in MIXTRAL.items() if key != "rope_theta"},
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 64,
    "rope_theta": 150000,
    "sliding_window": 128,
    "layer_types": ["full_attention"],
    "attention_bias": True,
    "swiglu_limit": 7.0,
}

Part = tuple[int, str]


def weights(seed: int = 0) -> dict[Part, Tensor]:
    """Random gate, up and down of every expert; up is eight times larger than gate."""
    generator = torch.Generator().manual_seed(seed)
    sizes = {"gate": (F, D, 1.0), "up": (F, D, 8.0), "down": (D, F, 1.0)}
    return {
        (expert, part): (torch.randn(n, k, generator=generator) * scale).bfloat16()
        for expert in range(E)
        for part, (n, k, scale) in sizes.items()
    }


def save(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def per_expert(
    matrices: Mapping[Part, QuantMatrix], dialect: Dialect, *, experts: str, names: Mapping[str, str]
) -> dict[str, Tensor]:
    return {
        dialect.tensor_name(f"model.layers.0.{experts}.{expert}.{names[part]}", suffix): tensor
        for (expert, part), matrix in matrices.items()
        for suffix, tensor in write(matrix, dialect).items()
    }


PROJ = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
W123 = {"gate": "w1", "up": "w3", "down": "w2"}


def qwen_checkpoint(directory: Path, matrices: Mapping[Part, QuantMatrix], dialect: Dialect) -> Path:
    tensors = per_expert(matrices, dialect, experts="mlp.experts", names=PROJ)
    return save(directory, QWEN3, tensors | {"model.layers.0.mlp.gate.weight": torch.randn(E, D).bfloat16()})


def plain_checkpoint(directory: Path, seed: int = 0) -> Path:
    return qwen_checkpoint(directory, {k: QuantMatrix.plain(w) for k, w in weights(seed).items()}, Dialect.PLAIN)


def edit(directory: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrites the checkpoint's only file."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "model.safetensors")


def moe_of(loader: Loader) -> MoESpec:
    moe = loader.spec.layers[0].feed_forward
    assert isinstance(moe, MoESpec)
    return moe


def load_layer(directory: Path) -> tuple[ExpertTensors, Accounting]:
    loader = Loader.open(directory)
    loader.router(0, moe_of(loader))
    experts = loader.experts(0, moe_of(loader))
    return experts, loader.finish()


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load_layer(directory)
    return str(caught.value)


def stacked(matrices: Mapping[Part, QuantMatrix]) -> tuple[Tensor, Tensor]:
    """What the experts must decode to: gate_up `[E, 2F, D]` and down `[E, D, F]`."""
    decoded = {key: decode(matrix) for key, matrix in matrices.items()}
    gate_up = torch.stack([torch.cat((decoded[e, "gate"], decoded[e, "up"])) for e in range(E)])
    return gate_up, torch.stack([decoded[e, "down"] for e in range(E)])


def expect_equal(experts: ExpertTensors, matrices: Mapping[Part, QuantMatrix]) -> None:
    gate_up, down = stacked(matrices)
    assert experts.gate_up.shape == (E, 2 * F, D)
    assert experts.down.shape == (E, D, F)
    assert torch.equal(decode(experts.gate_up), gate_up)
    assert torch.equal(decode(experts.down), down)


STORED: dict[Dialect, Format] = {
    Dialect.PLAIN: BF16,
    Dialect.MODELOPT_NVFP4: NVFP4,
    Dialect.CT_NVFP4: NVFP4,
    Dialect.CT_MXFP4: MXFP4,
    Dialect.FP8_BLOCK: FP8_BLOCK,
    Dialect.MODELOPT_FP8: FP8_TENSOR,
    Dialect.CT_FP8: FP8_CHANNEL,
    Dialect.CT_INT4: int4(32),
    Dialect.GPTQ: int4(32),
    Dialect.AWQ: int4(32),
}


def encoded(dialect: Dialect, seed: int = 0) -> dict[Part, QuantMatrix]:
    format = STORED[dialect]
    if format is BF16:
        return {key: QuantMatrix.plain(weight) for key, weight in weights(seed).items()}
    meaning = Meaning.DIVIDES if dialect is Dialect.CT_NVFP4 else Meaning.MULTIPLIES
    return {key: encode(weight, format, tensor_scale=meaning) for key, weight in weights(seed).items()}


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


def stacked_nvfp4_checkpoint(directory: Path, shape: tuple[int, ...]) -> dict[Part, QuantMatrix]:
    """Experts in one NVFP4 tensor per projection, the tensor scales of gate and up in one tensor of that shape."""
    matrices = encoded(Dialect.MODELOPT_NVFP4)

    def joined(field: str, *parts: str) -> Tensor:
        rows = [torch.cat([matrices[e, part].tensors[field] for part in parts]) for e in range(E)]
        return torch.stack(rows)

    tensors = {
        "gate_up_proj": joined("codes", "gate", "up"),
        "gate_up_proj_scale": joined("scale", "gate", "up"),
        "gate_up_proj_scale_2": joined("global_scale", "gate", "up").reshape(shape),
        "down_proj": joined("codes", "down"),
        "down_proj_scale": joined("scale", "down"),
        "down_proj_scale_2": joined("global_scale", "down").reshape(E),
    }
    renamed = {f"model.layers.0.mlp.experts.{name}": tensor for name, tensor in tensors.items()}
    save(directory, QWEN3, renamed | {"model.layers.0.mlp.gate.weight": torch.ones(E, D)})
    return matrices


def gpt_oss_checkpoint(directory: Path, *, quantised: bool) -> tuple[dict[Part, QuantMatrix], dict[str, Tensor]]:
    """Experts as gpt-oss stores them, rows alternating gate and up; returns what they mean, and the biases."""
    matrices = {
        key: encode(weight, MXFP4) if quantised else QuantMatrix.plain(weight) for key, weight in weights().items()
    }

    def alternating(field: str) -> Tensor:
        pairs = [torch.stack([matrices[e, p].tensors[field] for p in ("gate", "up")], dim=1) for e in range(E)]
        return torch.stack(pairs).flatten(1, 2)

    def down(field: str) -> Tensor:
        return torch.stack([matrices[e, "down"].tensors[field] for e in range(E)])

    biases = {"gate": torch.randn(E, F).bfloat16(), "up": torch.randn(E, F).bfloat16(), "down": torch.randn(E, D)}
    tensors = {
        "gate_up_proj_bias": torch.stack((biases["gate"], biases["up"]), dim=-1).flatten(1),
        "down_proj_bias": biases["down"],
    }
    if quantised:
        for name, of in (("gate_up_proj", alternating), ("down_proj", down)):
            tensors[f"{name}_blocks"] = of("codes").view(E, -1, D // 32, 16)
            tensors[f"{name}_scales"] = of("scale")
    else:
        tensors |= {"gate_up_proj": alternating("codes").mT, "down_proj": down("codes").mT}
    renamed = {f"model.layers.0.mlp.experts.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    router = {"model.layers.0.mlp.router.weight": torch.randn(E, D), "model.layers.0.mlp.router.bias": torch.randn(E)}
    save(directory, GPT_OSS, renamed | router)
    return matrices, biases


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
    expected = {f"{module}.weight" for module in (names.embed, names.norm, names.head)}
    loader.tensor(f"{names.norm}.weight", (hidden,))
    for number, layer in enumerate(loader.spec.layers):
        expected |= set(layer_tensors(names, number))
        if isinstance(layer.feed_forward, MoESpec):
            experts = loader.experts(number, layer.feed_forward)
            root = f"model.layers.{number}.mlp"
            assert torch.equal(experts.gate_up.codes, state[f"{root}.experts.gate_up_proj"])
            assert torch.equal(experts.down.codes, state[f"{root}.experts.down_proj"])
            assert torch.equal(loader.router(number, layer.feed_forward).weight, state[f"{root}.gate.weight"])
        for name in layer_tensors(names, number):
            if ".experts." not in name and "gate.weight" not in name:
                assert torch.equal(loader.tensor(name, tuple(state[name].shape)), state[name])
    assert expected == set(loader.index.tensors)
    assert loader.finish().consumed == len(expected)


EXPERT = "model.layers.0.mlp.experts"


def test_a_tensor_removed_is_named_with_its_shape(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.weight"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj.weight: found no such tensor, expected shape [{F}, {D}]" in message
    assert "1 problem\n" in message


def test_a_scale_removed_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.weight_scale"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj" in message
    assert "weight_scale" in message


def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.mystery": torch.ones(1)}))
    message = refusal(tmp_path)
    assert "model.layers.0.mlp.mystery: found it in the files, expected a use for it, or a waiver by name" in message


def test_a_tensor_renamed_is_named_under_both_names(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.1.down.weight"] = tensors.pop(f"{EXPERT}.1.down_proj.weight")

    edit(tmp_path, rename)
    message = refusal(tmp_path)
    assert f"{EXPERT}.1.down_proj.weight: found no such tensor" in message
    assert f"{EXPERT}.1.down.weight: found it in the files" in message


def test_a_wrong_shape_of_one_expert_is_named_with_the_shape_of_the_others(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    wrong = torch.ones(F, D // 2).bfloat16()
    edit(tmp_path, lambda tensors: tensors.update({f"{EXPERT}.3.gate_proj.weight": wrong}))
    assert f"{EXPERT}.3.gate_proj.weight: found BF16 [{F}, {D // 2}], expected BF16 [{F}, {D}]" in refusal(tmp_path)


def test_a_wrong_shape_of_all_experts_is_named_with_the_models(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"moe_intermediate_size": 2 * F}))
    message = refusal(tmp_path)
    assert f"{EXPERT}.*.gate_proj" in message
    assert f"[{E}, {2 * F}, {D}]" in message


def test_a_wrong_shape_of_a_single_tensor_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(E + 1, D)}))
    message = refusal(tmp_path)
    assert f"model.layers.0.mlp.gate.weight: found shape [{E + 1}, {D}], expected shape [{E}, {D}]" in message


def test_a_quantised_tensor_where_a_plain_one_must_be_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    router = torch.ones(E, D).to(torch.float8_e5m2)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.gate.e_score_correction_bias": router[0, :E]}))
    loader = Loader.open(tmp_path)
    moe = moe_of(loader)
    loader.router(0, replace(moe, routing=replace(moe.routing, selection_bias=True)))
    loader.experts(0, moe)
    with pytest.raises(CheckpointError, match="bias: found dtype F8_E5M2, expected BF16 or F16 or F32"):
        loader.finish()


def test_stacked_codes_of_too_few_rows_are_named(tmp_path: Path) -> None:
    stacked_nvfp4_checkpoint(tmp_path, (E, 2))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = torch.ones(E, 1, D // 2, dtype=torch.uint8)
    edit(tmp_path, lambda tensors: tensors.update({name: codes}))
    assert f"{name}" in refusal(tmp_path)


def test_experts_in_two_dialects_are_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)

    def unquantise(tensors: dict[str, Tensor]) -> None:
        for part in ("weight", "weight_scale", "weight_scale_2"):
            del tensors[f"{EXPERT}.1.gate_proj.{part}"]
        tensors[f"{EXPERT}.1.gate_proj.weight"] = torch.ones(F, D).bfloat16()

    edit(tmp_path, unquantise)
    message = refusal(tmp_path)
    assert f"{EXPERT}.1.gate_proj" in message
    assert "modelopt-nvfp4" in message


def test_a_bad_scale_is_named_with_its_expert(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)
    edit(tmp_path, lambda tensors: tensors[f"{EXPERT}.2.up_proj.weight_scale_2"].fill_(torch.inf))
    message = refusal(tmp_path)
    assert f"{EXPERT}.*.up_proj.weight_scale_2: found 1 infinite" in message
    assert "in experts 2" in message
    assert ": found 1 problem\n" in message


def test_an_int4_shape_unlike_the_others_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.CT_INT4), Dialect.CT_INT4)
    edit(tmp_path, lambda tensors: tensors[f"{EXPERT}.2.up_proj.weight_shape"].fill_(7))
    assert f"{EXPERT}.2.up_proj.weight_shape: found [7, 7], expected [{F}, {D}]" in refusal(tmp_path)


def test_a_part_that_only_some_experts_have_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.GPTQ), Dialect.GPTQ)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.g_idx"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj.g_idx: found no such tensor, expected it, as other experts have it" in message


def test_many_tensors_are_grouped_and_none_is_left_out(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    extra = {f"model.layers.{i}.mlp.experts.{e}.w9.weight": torch.ones(1) for i in range(7) for e in (0, 1, 2, 5)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    assert "model.layers.{0-6}.mlp.experts.{0-2,5}.w9.weight (28 tensors)" in refusal(tmp_path)


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{EXPERT}.0.gate_proj.weight"]
        tensors["model.layers.0.mlp.gate.weight"] = torch.ones(1, 1)
        tensors["stray.weight"] = torch.ones(3)

    edit(tmp_path, spoil)
    message = refusal(tmp_path)
    for part in ("0.gate_proj.weight", "gate.weight: found shape [1, 1]", "stray.weight"):
        assert part in message
    assert "3 problems" in message


def test_what_is_wrong_stands_as_nan_and_the_loader_says_it_is_not_sound(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    loader = Loader.open(tmp_path)
    assert loader.sound
    matrix = loader.matrix("model.layers.0.self_attn.q_proj", (16, 8))
    assert not loader.sound
    assert matrix.shape == (16, 8)
    assert bool(matrix.codes.isnan().all())
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: found no such tensor, expected shape \[16, 8\]"):
        loader.finish()


def test_waived_tensors_are_listed_with_their_reason(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0),
        "lora.a": torch.ones(1),
    }
    edit(tmp_path, lambda tensors: tensors.update(extra))
    loader = Loader.open(tmp_path)
    loader.waive("lora.*", "adapters are not run")
    loader.router(0, moe_of(loader))
    loader.experts(0, moe_of(loader))
    waived = loader.finish().waived
    assert waived["adapters are not run"] == ("lora.a",)
    assert {name for names in waived.values() for name in names} == set(extra)


def test_draft_layers_are_waived_only_while_no_draft_is_run(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    spec = replace(Loader.open(tmp_path).spec, family="deepseek_v3", draft_layers=1)
    names = Names(spec)
    assert names.layer(1) == "model.layers.1"
    idle = {waiver.pattern for waiver in names.waivers(draft=False)}
    running = {waiver.pattern for waiver in names.waivers(draft=True)}
    assert idle - running == {"model.layers.1.*"}
    assert {"model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight"} <= running
    qwen = Names(replace(spec, family="qwen3_next"))
    assert qwen.layer(1) == "mtp.layers.0"
    assert "mtp.*" in {waiver.pattern for waiver in qwen.waivers(draft=False)}


@pytest.mark.parametrize("stored", ["no head", "the same head", "another head"])
def test_a_tied_head_is_the_embedding_and_a_stored_one_must_equal_it(tmp_path: Path, stored: str) -> None:
    embedding = torch.randn(V, D).bfloat16()
    tensors = {"model.embed_tokens.weight": embedding}
    if stored != "no head":
        tensors["lm_head.weight"] = embedding + (stored == "another head")
    save(tmp_path, QWEN3 | {"tie_word_embeddings": True}, tensors)
    loader = Loader.open(tmp_path)
    assert torch.equal(loader.embedding(), embedding)
    assert torch.equal(loader.head().codes, embedding)
    if stored == "another head":
        with pytest.raises(CheckpointError, match=r"lm_head.weight: found values other than model.embed_tokens.weight"):
            loader.finish()
    else:
        assert loader.finish().consumed == 1


def test_progress_runs_to_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    loader = Loader.open(tmp_path, progress=lambda done, total: seen.append((done, total)))
    loader.router(0, moe_of(loader))
    loader.experts(0, moe_of(loader))
    assert seen[-1] == (loader.index.nbytes, loader.index.nbytes)


def test_a_missing_config_is_an_input_error_too(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(MusterError) as caught:
        Loader.open(tmp_path)
    assert caught.value.exit_code == 2


PEAK = """
import pathlib, resource, sys, torch
from muster.checkpoint.loader import Loader
def resident(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) << 10
loader = Loader.open(pathlib.Path(sys.argv[1]))
before = resident("VmRSS")
layers = [loader.experts(i, layer.feed_forward) for i, layer in enumerate(loader.spec.layers)]
print(resident("VmHWM") - before, sum(e.gate_up.nbytes + e.down.nbytes for e in layers), loader.index.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_peaks_little_above_the_weights_it_returns(tmp_path: Path) -> None:
    layers, inner, hidden = 16, 512, 512
    config = QWEN3 | {"num_hidden_layers": layers, "hidden_size": hidden, "moe_intermediate_size": inner}
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {
        f"model.layers.{i}.mlp.experts.{e}.{part}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for i in range(layers)
        for e in range(E)
        for part, shape in shapes.items()
    }
    save(tmp_path, config, tensors)
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True)
    peak, resident, checkpoint = map(int, done.stdout.split())
    assert resident == checkpoint
    assert peak < 1.3 * checkpoint, f"peak {peak / 2**20:.0f} MiB for {checkpoint / 2**20:.0f} MiB"
