"""The tensors of a case: weights read from a checkpoint or drawn from a seed, and tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from muster.checkpoint.loader import Loader
from muster.errors import UsageError
from muster.formats.codec import encode
from muster.formats.elements import E2M1_MAX, E4M3_MAX
from muster.formats.matrix import Meaning, QuantMatrix, Scale, concat_rows, stack
from muster.formats.slices import take_columns, take_rows
from muster.formats.spec import FP8_TENSOR, Element, Format
from muster.gemm.problem import LinearProblem
from muster.lab.prove.parts import Part, Role, expert_layers, expert_module, fuses, products
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights

UP_OVER_GATE = 1.7
"""How much larger drawn up rows are than gate rows: more than an e4m3 step, so that mixing up their scales shows."""


@dataclass(frozen=True, eq=False)
class ExpertInputs:
    """What an expert layer is given.

    Attributes:
        weights: of the experts of this rank.
        x_TD: tokens in the problem's dtype.
        routed: ids int64, weights float32 `[T, K]`.
    """

    weights: ExpertWeights
    x_TD: Tensor
    routed: Routed


@dataclass(frozen=True, eq=False)
class LinearInputs:
    """What a linear is given.

    Attributes:
        matrix: `[N, K]`.
        bias: float32 `[N]`, or None.
        x_TK: tokens in the problem's dtype.
    """

    matrix: QuantMatrix
    bias: Tensor | None
    x_TK: Tensor


Inputs = ExpertInputs | LinearInputs


def read_experts(part: Part, problem: MoEProblem, directory: Path) -> ExpertWeights:
    """The weights of the layer that `part` names: its rank's experts, each cut to its rank's inner width.

    Raises:
        CheckpointError: whatever is wrong with the tensors of that layer.
        UsageError: the checkpoint has no such layer.
    """
    loader = _open(part, directory)
    layers = {expert_module(loader, number): (number, moe) for _, number, moe in expert_layers(loader)}
    if part.module not in layers:
        raise _absent(part, directory)
    tensors = loader.experts(*layers[part.module])
    loader.finish()
    pieces = 2 if problem.activation.gated else 1
    local = slice(problem.first_expert, problem.first_expert + problem.local_experts)
    gate_up = take_rows(_experts(tensors.gate_up, local), 0, problem.inner, pieces)
    down = take_columns(_experts(tensors.down, local), 0, problem.inner)
    gate_up_bias = down_bias = None
    if tensors.gate_up_bias is not None and tensors.down_bias is not None:
        by_piece = torch.unflatten(tensors.gate_up_bias[local], -1, (pieces, -1))
        gate_up_bias = by_piece[..., : problem.inner].flatten(-2).contiguous()
        down_bias = tensors.down_bias[local].contiguous()
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias)


def read_linear(part: Part, problem: LinearProblem, directory: Path) -> tuple[QuantMatrix, Tensor | None]:
    """The matrix `[N, K]` and the float32 bias of the linear that `part` names, fused as the model fuses them.

    Raises:
        CheckpointError: whatever is wrong with its tensors.
        UsageError: the checkpoint has no such linear.
    """
    loader = _open(part, directory)
    product = next((product for product in products(loader) if part.module in product.modules), None)
    if product is None:
        raise _absent(part, directory)
    modules = product.modules if fuses(loader, product) else {part.module: product.modules[part.module]}
    matrices = [loader.matrix(module, (rows, problem.columns)) for module, rows in modules.items()]
    biases = [loader.tensor(f"{module}.bias", (rows,)) for module, rows in modules.items() if problem.bias]
    loader.finish()
    matrix = concat_rows(matrices) if len(matrices) > 1 else matrices[0]
    return matrix, torch.cat(biases).float() if biases else None


def _open(part: Part, directory: Path) -> Loader:
    loader = Loader.open(directory, draft=part.role is Role.DRAFT)
    loader.waive("*", "one part is proven at a time")
    return loader


def _absent(part: Part, directory: Path) -> UsageError:
    return UsageError(
        f"checkpoint {directory}", found=f"nothing at {part.module}", expected=f"the weights of {part.key}"
    )


def _experts(matrix: QuantMatrix, local: slice) -> QuantMatrix:
    tensors = {name: tensor[local] for name, tensor in matrix.tensors.items()}
    return matrix.with_tensors(tensors, (local.stop - local.start, *matrix.shape[1:]))


def draw_experts(problem: MoEProblem, seed: int) -> ExpertWeights:
    """Weights whose scale differs from expert to expert and from row to row, with columns that stand out.

    NVFP4's tensor scale multiplies for even seeds and divides for odd ones. An activation limit is reached by some.
    """
    pieces = 2 if problem.activation.gated else 1
    reach = max(1.0, (problem.activation.limit or 0.0) / 3)
    gate_up, down = [], []
    for expert in range(problem.first_expert, problem.first_expert + problem.local_experts):
        generator = _generator(seed, expert)
        scale = float(torch.randn((), generator=generator).mul(0.1).exp())
        first = _draw(problem.gate_up_rows, problem.hidden, generator).mul_(scale * reach)
        if pieces == 2:
            first[problem.inner :] *= UP_OVER_GATE
        second = _draw(problem.hidden, problem.inner, generator).mul_(scale)
        gate_up.append(_encode(first, problem.weights, pieces, seed, problem.act_order, generator))
        down.append(_encode(second, problem.weights, 1, seed, problem.act_order, generator))
    biases: list[Tensor | None] = [None, None]
    if problem.bias:
        generator = _generator(seed, -1)
        shapes = ((problem.local_experts, problem.gate_up_rows), (problem.local_experts, problem.hidden))
        biases = [torch.randn(shape, generator=generator) for shape in shapes]
    return ExpertWeights(stack(gate_up), stack(down), *biases)


def draw_linear(problem: LinearProblem, seed: int) -> tuple[QuantMatrix, Tensor | None]:
    """A matrix `[N, K]` of the same kind, of two row pieces where N is even, and its float32 bias."""
    generator = _generator(seed, 0)
    pieces = 2 - problem.rows % 2
    weight = _draw(problem.rows, problem.columns, generator)
    if pieces == 2:
        weight[problem.rows // 2 :] *= UP_OVER_GATE
    bias = torch.randn(problem.rows, generator=generator) if problem.bias else None
    return _encode(weight, problem.weights, pieces, seed, problem.act_order, generator), bias


def draw_tokens(tokens: int, width: int, blank: bool, generator: torch.Generator) -> Tensor:
    """float32 `[T, width]`: what a norm gives, with some columns ten times the rest; a third blank, never the last."""
    x = torch.randn(tokens, width, generator=generator)
    x *= torch.randn(tokens, 1, generator=generator).mul_(0.1).exp_()
    x *= _outliers(width, 10.0, generator)
    if blank:
        x[:-1:3] = 0.0
    return x


def _draw(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    weight = torch.randn(rows, columns, generator=generator).div_(math.sqrt(columns))
    weight *= torch.randn(rows, 1, generator=generator).mul_(0.3).exp_()
    return weight.mul_(_outliers(columns, 4.0, generator))


def _outliers(width: int, factor: float, generator: torch.Generator) -> Tensor:
    """Ones, with `factor` at one column in a hundred, at least one."""
    scale = torch.ones(width)
    scale[torch.randperm(width, generator=generator)[: max(1, width // 100)]] = factor
    return scale


def _encode(
    weight: Tensor, format: Format, pieces: int, seed: int, act_order: bool, generator: torch.Generator
) -> QuantMatrix:
    meaning = Meaning.DIVIDES if seed % 2 else Meaning.MULTIPLIES
    own_scales = format.global_scale or format is FP8_TENSOR
    matrix = encode(weight, format, pieces if own_scales else 1, meaning)
    if own_scales:
        matrix = replace(matrix, input_scale=_input_scale(format, pieces, meaning))
    if not act_order:
        return matrix
    assert matrix.scale is not None, "only int4 has an order of columns"
    groups = torch.arange(weight.shape[-1], dtype=torch.int32) // (weight.shape[-1] // matrix.scale.value.shape[-1])
    return replace(matrix, order=groups[torch.randperm(len(groups), generator=generator)])


def _input_scale(format: Format, pieces: int, meaning: Meaning) -> Scale:
    """What calibration would have found, had it seen tokens up to 40."""
    scale = 40.0 / (E4M3_MAX * (E2M1_MAX if format.global_scale else 1.0))
    value = torch.full((pieces,), 1 / scale if meaning is Meaning.DIVIDES else scale)
    return Scale(value, Element.F32, meaning)


def _generator(seed: int, number: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed << 20) + number + 1)
