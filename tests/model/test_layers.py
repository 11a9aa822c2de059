from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from muster.checkpoint.spec import RopeSpec, YarnSpec
from muster.model.layers import Embedding, GatedMLP, RMSNorm, Rope, SideBySide, frequencies

CPU = torch.device("cpu")


def relative(got: Tensor, wanted: Tensor) -> float:
    return float((got.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("zero_centred", [False, True])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("tokens", [1, 7])
def test_rms_norm_is_its_definition_at_every_size(tokens: int, size: float, zero_centred: bool) -> None:
    x, weight = torch.randn(tokens, 96) * size, torch.randn(96)
    gain = weight.double() + zero_centred
    wanted = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * gain
    assert relative(RMSNorm(weight, 1e-6, zero_centred=zero_centred)(x), wanted) < 3e-7


def test_rms_norm_of_zeros_is_zeros() -> None:
    assert torch.equal(RMSNorm(torch.randn(8), 1e-6)(torch.zeros(2, 8)), torch.zeros(2, 8))


def test_rms_norm_norms_each_head_with_its_own_weight() -> None:
    x, weight = torch.randn(5, 3, 16), torch.randn(3, 16)
    wanted = torch.stack([RMSNorm(weight[head], 1e-5)(x[:, head]) for head in range(3)], 1)
    assert relative(RMSNorm(weight, 1e-5)(x), wanted) < 1e-7


def rotate_pair_by_pair(x: Tensor, positions: Tensor, spec: RopeSpec) -> Tensor:
    """Each pair as a complex number, turned by position * theta^(-2j / width), in float64."""
    out, half = x.double().clone(), spec.width // 2
    for j in range(half):
        a, b = (2 * j, 2 * j + 1) if spec.interleaved else (j, j + half)
        angle = positions.double() * spec.theta ** (-2 * j / spec.width)
        turned = (
            torch.complex(x[..., a].double(), x[..., b].double()) * torch.polar(torch.ones_like(angle), angle)[:, None]
        )
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("width", [16, 8, 2])
def test_rope_turns_each_pair_and_leaves_the_rest_alone(width: int, interleaved: bool) -> None:
    spec = RopeSpec(theta=10_000.0, width=width, interleaved=interleaved)
    rope, x, positions = Rope(spec, CPU), torch.randn(6, 3, 16), torch.tensor([0, 1, 2, 50, 7, 300])
    turned = rope.turn(x, rope.at(positions))
    assert relative(turned, rotate_pair_by_pair(x, positions, spec)) < 1e-5
    assert torch.equal(turned[..., width:], x[..., width:])
    assert torch.equal(turned[0], x[0])


def test_rope_scores_depend_on_distance_alone() -> None:
    rope = Rope(RopeSpec(theta=10_000.0, width=32), CPU)
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def score(at: int, to: int) -> Tensor:
        turned = [rope.turn(x, rope.at(torch.tensor([p]))) for x, p in ((query, at), (key, to))]
        return (turned[0] * turned[1]).sum()

    assert torch.allclose(score(9, 4), score(109, 104), rtol=1e-4)
    assert not torch.allclose(score(9, 4), score(9, 5), rtol=1e-4)


YARNS = {
    "deepseek-v3": (RopeSpec(1e4, 64, yarn=YarnSpec(40.0, 4096)), {}),
    "kimi-k2": (RopeSpec(5e4, 64, yarn=YarnSpec(32.0, 4096, beta_fast=1.0)), {"beta_fast": 1.0}),
    "gpt-oss": (RopeSpec(1.5e5, 64, yarn=YarnSpec(32.0, 4096, truncate=False)), {"truncate": False}),
}


@pytest.mark.parametrize("name", YARNS)
def test_yarn_frequencies_are_those_of_transformers(name: str) -> None:
    spec, options = YARNS[name]
    assert spec.yarn is not None
    parameters = {
        "rope_type": "yarn",
        "rope_theta": spec.theta,
        "factor": spec.yarn.factor,
        "original_max_position_embeddings": spec.yarn.original_context,
        **options,
    }
    config = LlamaConfig(hidden_size=64, num_attention_heads=1, head_dim=spec.width, rope_parameters=parameters)
    wanted, _ = ROPE_INIT_FUNCTIONS["yarn"](config, CPU)
    assert relative(frequencies(spec), wanted) < 1e-6
    assert relative(frequencies(spec), frequencies(RopeSpec(spec.theta, spec.width))) > 1e-3


def test_yarn_attention_factor_scales_what_is_turned() -> None:
    yarn = YarnSpec(32.0, 4096, truncate=False, attention_factor=1.5)
    plain, scaled = (Rope(RopeSpec(1.5e5, 16, yarn=y), CPU) for y in (YarnSpec(32.0, 4096, truncate=False), yarn))
    x, positions = torch.randn(3, 2, 16), torch.tensor([0, 3, 9])
    assert relative(scaled.turn(x, scaled.at(positions)), 1.5 * plain.turn(x, plain.at(positions))) < 1e-6


def test_embedding_gives_float32_rows_and_keeps_its_table() -> None:
    table = torch.randn(10, 4).bfloat16()
    rows = Embedding(table)(torch.tensor([3, 3, 9]))
    assert rows.dtype == torch.float32
    assert torch.equal(rows, table[[3, 3, 9]].float())


@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_mlp_is_its_definition(activation: str) -> None:
    x, gate, up, down = torch.randn(5, 8), torch.randn(12, 8), torch.randn(12, 8), torch.randn(8, 12)
    act = {"silu": torch.nn.functional.silu, "gelu": torch.nn.GELU("tanh")}[activation]
    wanted = (act(x.double() @ gate.double().T) * (x.double() @ up.double().T)) @ down.double().T
    both = SideBySide((lambda rows: rows @ gate.T, lambda rows: rows @ up.T))
    assert relative(GatedMLP(both, lambda rows: rows @ down.T, activation)(x), wanted) < 1e-6
