"""The decoders from every quantised dialect, against transformers given the dequantised weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from muster.device import cpu
from muster.errors import CheckpointError
from muster.formats.codec import decode, encode
from muster.formats.dialects import Dialect, write
from muster.formats.matrix import Meaning, QuantMatrix
from muster.formats.spec import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, Format, int4
from muster.model.choosing import unproven
from muster.model.families import load

from .oracle import CLASSES, chunked, error, make, save, tokens, truth

EXPERTS, ALL_LINEARS = r"experts\.", r"_proj|experts\."

DIALECTS: dict[str, tuple[Dialect, Format]] = {
    "nvfp4": (Dialect.MODELOPT_NVFP4, NVFP4),
    "nvfp4-ct": (Dialect.CT_NVFP4, NVFP4),
    "mxfp4": (Dialect.CT_MXFP4, MXFP4),
    "fp8-block": (Dialect.FP8_BLOCK, FP8_BLOCK),
    "fp8-channel-modelopt": (Dialect.MODELOPT_FP8, FP8_CHANNEL),
    "fp8-tensor-modelopt": (Dialect.MODELOPT_FP8, FP8_TENSOR),
    "fp8-channel-ct": (Dialect.CT_FP8, FP8_CHANNEL),
    "fp8-tensor-ct": (Dialect.CT_FP8, FP8_TENSOR),
    "int4-ct": (Dialect.CT_INT4, int4(32)),
    "int4-gptq": (Dialect.GPTQ, int4(32)),
    "int4-awq": (Dialect.AWQ, int4(32)),
}

SHAPE = {"hidden_size": 192, "head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES = {
    "mixtral": {**SHAPE, "intermediate_size": 128, "num_local_experts": 4},
    "olmoe": {
        "hidden_size": 192,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 128,
        "num_experts": 4,
    },
    "qwen3_moe": {
        **SHAPE,
        "moe_intermediate_size": 128,
        "intermediate_size": 192,
        "num_experts": 4,
        "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}


def quantised(weight: Tensor, dialect: Dialect, format: Format) -> QuantMatrix:
    meaning = Meaning.DIVIDES if dialect is Dialect.CT_NVFP4 else Meaning.MULTIPLIES
    return encode(weight, format, tensor_scale=meaning)


def rewrite(source: Path, target: Path, change: Callable[[str, Tensor], dict[str, Tensor]]) -> Path:
    """A copy of a checkpoint with every tensor replaced by what `change` makes of it."""
    target.mkdir()
    (target / "config.json").write_text((source / "config.json").read_text())
    tensors: dict[str, Tensor] = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        tensors |= change(name, tensor)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


@pytest.mark.parametrize(
    ("family", "which"),
    [*((family, ALL_LINEARS) for family in FAMILIES), ("mixtral", EXPERTS)],
    ids=[*FAMILIES, "mixtral-experts-only"],
)
@pytest.mark.parametrize("name", DIALECTS)
def test_logits_equal_transformers_with_dequantised_weights(name: str, family: str, which: str, tmp_path: Path) -> None:
    dialect, format = DIALECTS[name]
    plain = save(make(family, **FAMILIES[family]), tmp_path / "plain")

    def as_stored(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.dim() != 2 or not re.search(which, tensor_name):
            return {tensor_name: tensor}
        module = tensor_name.removesuffix(".weight")
        parts = write(quantised(tensor, dialect, format), dialect)
        return {dialect.tensor_name(module, part): value for part, value in parts.items()}

    def as_decoded(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        if tensor.dim() != 2 or not re.search(which, tensor_name):
            return {tensor_name: tensor}
        return {tensor_name: decode(quantised(tensor, dialect, format))}

    ids = tokens(23)
    decoder = load(rewrite(plain, tmp_path / "stored", as_stored))
    model = CLASSES[family][1].from_pretrained(rewrite(plain, tmp_path / "decoded", as_decoded)).eval()
    wanted = truth(model, ids)
    for chunks in ([23], [14, *[1] * 9]):
        assert error(chunked(decoder, ids, chunks), wanted) < 1e-5, chunks
    assert error(truth(make(family, **FAMILIES[family]), ids), wanted) > 1e-3


def test_block_scales_that_straddle_query_and_key_rows_are_kept_apart(tmp_path: Path) -> None:
    shape = {**SHAPE, "head_dim": 24}
    plain = save(make("mixtral", **shape), tmp_path / "plain")

    def stored(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "self_attn" not in tensor_name:
            return {tensor_name: tensor}
        parts = write(encode(tensor, FP8_BLOCK), Dialect.FP8_BLOCK)
        return {f"{tensor_name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}

    def decoded(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        return {tensor_name: decode(encode(tensor, FP8_BLOCK)) if "self_attn" in tensor_name else tensor}

    ids = tokens(15)
    model = CLASSES["mixtral"][1].from_pretrained(rewrite(plain, tmp_path / "decoded", decoded)).eval()
    got = chunked(load(rewrite(plain, tmp_path / "stored", stored)), ids, [10, 5])
    assert error(got, truth(model, ids)) < 1e-5


def test_projections_in_different_formats_run_side_by_side(tmp_path: Path) -> None:
    plain = save(make("qwen3_moe", **FAMILIES["qwen3_moe"]), tmp_path / "plain")
    formats = {"q_proj": (Dialect.MODELOPT_NVFP4, NVFP4), "v_proj": (Dialect.CT_FP8, FP8_CHANNEL)}

    def of(tensor_name: str) -> tuple[Dialect, Format] | None:
        return next((choice for part, choice in formats.items() if part in tensor_name), None)

    def stored(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        choice = of(tensor_name)
        if choice is None:
            return {tensor_name: tensor}
        parts = write(encode(tensor, choice[1]), choice[0])
        return {f"{tensor_name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}

    def decoded(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        choice = of(tensor_name)
        return {tensor_name: tensor if choice is None else decode(encode(tensor, choice[1]))}

    ids = tokens(15)
    model = CLASSES["qwen3_moe"][1].from_pretrained(rewrite(plain, tmp_path / "decoded", decoded)).eval()
    got = chunked(load(rewrite(plain, tmp_path / "stored", stored)), ids, [10, 5])
    assert error(got, truth(model, ids)) < 1e-5


def test_quantised_weights_stay_quantised(tmp_path: Path) -> None:
    plain = save(make("mixtral", **FAMILIES["mixtral"]), tmp_path / "plain", torch.bfloat16)

    def stored(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "experts" not in tensor_name:
            return {tensor_name: tensor}
        parts = write(encode(tensor, NVFP4), Dialect.MODELOPT_NVFP4)
        return {f"{tensor_name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}

    target = rewrite(plain, tmp_path / "stored", stored)
    on_disk = (target / "model.safetensors").stat().st_size
    header = int.from_bytes((target / "model.safetensors").read_bytes()[:8], "little")
    json.loads((target / "model.safetensors").read_bytes()[8 : 8 + header])
    assert load(target, choose=unproven(cpu(), "torch")).weight_bytes < 1.2 * (on_disk - header)


def test_experts_in_two_formats_are_refused_with_both_names(tmp_path: Path) -> None:
    plain = save(make("mixtral", **FAMILIES["mixtral"]), tmp_path / "plain")

    def stored(tensor_name: str, tensor: Tensor) -> dict[str, Tensor]:
        if "w2" not in tensor_name:
            return {tensor_name: tensor}
        parts = write(encode(tensor, FP8_CHANNEL), Dialect.CT_FP8)
        return {f"{tensor_name.removesuffix('.weight')}.{part}": value for part, value in parts.items()}

    with pytest.raises(CheckpointError, match="experts of layer 0: found gate and up in f32, down in fp8-channel"):
        load(rewrite(plain, tmp_path / "stored", stored))
