"""Expert layers of the sizes that models have on one rank, with random weights and routings."""

from __future__ import annotations

from dataclasses import replace

import torch

from muster.formats.elements import E4M3_MAX
from muster.formats.matrix import QuantMatrix, Scale
from muster.formats.spec import FORMATS, Element, Format
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.weights import ExpertWeights

SHAPES = {
    "397B": (512, 10, 4096, 1024),
    "397B/2": (512, 10, 4096, 512),
    "397B/8": (512, 10, 4096, 128),
    "30B": (128, 8, 2048, 768),
    "GLM-5/8": (256, 8, 6144, 256),
    "Mixtral": (8, 2, 4096, 14336),
    "gpt-oss": (128, 4, 2880, 2880),
    "DeepSeek-V3/8": (256, 8, 7168, 256),
}
"""Experts, K, D, F on one rank."""
GPU = torch.device("cuda")


def problem(shape: str, format: str) -> MoEProblem:
    """The layer."""
    experts, top_k, hidden, inner = SHAPES[shape]
    gpt_oss = shape == "gpt-oss"
    activation = Activation("swiglu-oai", limit=7.0) if gpt_oss else Activation()
    return MoEProblem(
        hidden,
        inner,
        experts,
        RoutingRule(top_k),
        experts,
        weights=FORMATS[format],
        activation=activation,
        bias=gpt_oss,
    )


def drawn(
    experts: int, rows: int, columns: int, format: Format, pieces: int, device: torch.device = GPU
) -> QuantMatrix:
    """Random codes and scales; values of about the size that keeps activations as they are.

    The row pieces of an expert share their tensor scale: the layouts of other engines have one for both.
    """
    size = columns**-0.5
    shape = (experts, rows, columns)
    if not format.quantised:
        codes = torch.empty(shape, dtype=torch.bfloat16, device=device)
        for expert in codes:
            expert.normal_(0.0, size)
        return QuantMatrix.plain(codes)
    packed = (experts, rows, columns // format.codes_per_byte)
    scale_shape = (experts, *format.scale_shape(rows, columns))
    if format.name == "fp8-block":
        values = (torch.randn(packed, device=device, dtype=torch.bfloat16) * 100).clamp_(-E4M3_MAX, E4M3_MAX)
        scales = (torch.rand(scale_shape, device=device) + 0.5) * size / 100
        return QuantMatrix(format, shape, values.to(torch.float8_e4m3fn), Scale(scales, Element.F32))
    codes = torch.randint(0, 256, packed, dtype=torch.uint8, device=device)
    if format.name == "nvfp4":
        scales = (torch.rand(scale_shape, device=device) * 7.5 + 0.5).to(torch.float8_e4m3fn)
        tensor = ((torch.rand(experts, 1, device=device) + 0.5) * size / 12).repeat(1, pieces)
        return QuantMatrix(format, shape, codes, Scale(scales, Element.E4M3), Scale(tensor, Element.F32))
    exponent = torch.randint(-2, 2, scale_shape, device=device) + round(torch.tensor(size / 3).log2().item())
    return QuantMatrix(format, shape, codes, Scale((exponent + 127).to(torch.uint8), Element.E8M0))


def layer(problem: MoEProblem, device: torch.device = GPU) -> ExpertWeights:
    """The weights of the layer; biases have values of bf16, as they are published."""
    pieces = 2 if problem.activation.gated else 1
    gate_up = drawn(problem.experts, problem.gate_up_rows, problem.hidden, problem.weights, pieces, device)
    down = drawn(problem.experts, problem.hidden, problem.inner, problem.weights, 1, device)
    if not problem.bias:
        return ExpertWeights(gate_up, down)
    shapes = ((problem.experts, problem.gate_up_rows), (problem.experts, problem.hidden))
    return ExpertWeights(gate_up, down, *(torch.randn(shape, device=device).bfloat16().float() for shape in shapes))


def copied(weights: ExpertWeights) -> ExpertWeights:
    """The same weights elsewhere in memory, as those of another layer are."""
    return replace(weights, gate_up=_copied(weights.gate_up), down=_copied(weights.down))


def _copied(matrix: QuantMatrix) -> QuantMatrix:
    return matrix.with_tensors({name: tensor.clone() for name, tensor in matrix.tensors.items()}, matrix.shape)


def routings(problem: MoEProblem, tokens: int, count: int = 12, device: torch.device = GPU) -> list[Routed]:
    """Uniform, K distinct experts per token."""
    found = []
    for _ in range(count):
        ids = torch.rand(tokens, problem.experts, device=device).topk(problem.routing.top_k).indices.contiguous()
        weights = torch.rand(ids.shape, device=device) + 0.5
        found.append(Routed(ids, weights / weights.sum(-1, keepdim=True)))
    return found
