"""Small checkpoints of one expert layer in every dialect and layout, and what they must decode to."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muster.checkpoint.loader import Accounting, ExpertTensors, Loader
from muster.checkpoint.spec import MoESpec
from muster.errors import CheckpointError
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
