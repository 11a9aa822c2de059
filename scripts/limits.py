"""How far correct kernels are from the references that judge them, over many draws: where the judge's limits come from.

Correct kernels are the registered backends and float32 computations that round where published kernels round. Their
noise is heavy-tailed: what a float32 sum is off by almost never matters, until it carries a value over the edge between
two codes, and then a whole step of that code shows. So the limits rest on the worst of many draws, times three.

python scripts/limits.py results/limits.jsonl
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from setting import setting
from torch import Tensor

from muster.device import cpu
from muster.formats.rounding import EXACT, Grid, Rounding
from muster.formats.spec import BF16, FORMATS, FP8_BLOCK, NVFP4, Format, int4
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab.prove.candidate import Candidate
from muster.lab.prove.cases import Case, ExpertInputs, Inputs, LinearInputs, Part, Role, build, decline
from muster.lab.prove.tolerance import grade, rounding_of, weigh
from muster.moe.problem import MoEProblem, RoutingRule
from muster.moe.reference import expert_layer
from muster.moe.registry import backends
from muster.workspace import Workspace

Kernel = Callable[[Case, Inputs], Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Shape:
    """Of an expert layer, with how many tokens and draws it is measured."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    tokens: int
    draws: int


SHAPES = (Shape(128, 128, 8, 2, 16, 120), Shape(640, 256, 8, 8, 16, 12), Shape(4096, 1024, 3, 2, 16, 1))
COARSE = (BF16, NVFP4, FP8_BLOCK, int4(32))
LONG = LinearProblem(128, 7168, BF16, "f32")


def main() -> None:
    """Writes one JSON line per kernel, shape and format, and prints the worst of each grade."""
    torch.set_num_threads(1)
    worst: dict[str, tuple[float, float]] = {}
    with Path(sys.argv[1]).open("w") as lines:
        for name, rounding, kernel, drawn in measurements():
            errors = [weigh(kernel(case, inputs), case, inputs, rounding)[1] for case, inputs in drawn]
            case = drawn.first
            whole = sorted(error.whole for error in errors)
            tokens = sorted(error.worst_token for error in errors)
            record = {
                "grade": grade(rounding, case.part.problem.dtype),
                "kernel": name,
                "rounding": {point: grid.value for point, grid in vars(rounding).items() if grid is not Grid.NONE},
                "part": case.part.key,
                "tokens": case.tokens,
                "draws": len(errors),
                "whole": {"median": whole[len(whole) // 2], "worst": whole[-1]},
                "worst_token": {"median": tokens[len(tokens) // 2], "worst": tokens[-1]},
                "ideal_whole": max(error.ideal_whole or 0.0 for error in errors),
                **setting(),
            }
            lines.write(json.dumps(record) + "\n")
            known = worst.get(record["grade"], (0.0, 0.0))
            worst[record["grade"]] = (max(known[0], whole[-1]), max(known[1], tokens[-1]))
            print(record["grade"], name, case.part.key, f"{whole[-1]:.2e} {tokens[-1]:.2e}", flush=True)
    for name, (whole, token) in worst.items():
        print(f"{name}: worst {whole:.2e} {token:.2e}, three times {3 * whole:.2e} {3 * token:.2e}")


@dataclass
class Draws:
    """The cases of one part, one for each seed."""

    first: Case
    count: int

    def __iter__(self) -> Iterator[tuple[Case, Inputs]]:
        for seed in range(self.count):
            case = replace(self.first, seed=seed)
            yield case, build(case, CPU)


def measurements() -> Iterator[tuple[str, Rounding, Kernel, Draws]]:
    """Every kernel on every shape and format."""
    for shape in SHAPES:
        for format in FORMATS.values():
            drawn = draws(replace(shape, draws=-(-shape.draws // 4)), "f32", format)
            yield "float32", EXACT, in_float32(EXACT), drawn
            for name in backends().names():
                if decline(name, drawn.first, cpu()) is None:
                    yield name, rounding_of(name, drawn.first.part.problem), registered(name), drawn
        for format in COARSE:
            for dtype, rounding in roundings():
                yield "float32 sums", rounding, in_float32(rounding), draws(shape, dtype, format)
            drawn = draws(shape, "bf16", format)
            yield "torch", rounding_of("torch", drawn.first.part.problem), registered("torch"), drawn
    case = Case(Part(Role.LINEARS, LONG, "", 1), 16, "dense", 0)
    yield "one after the other", EXACT, one_after_the_other, Draws(case, 40)
    for name in linears().names():
        yield name, EXACT, registered(name), Draws(case, 40)


def draws(shape: Shape, dtype: str, format: Format) -> Draws:
    """The draws of a shape."""
    rule = RoutingRule(shape.top_k)
    problem = MoEProblem(shape.hidden, shape.inner, shape.experts, rule, shape.experts, weights=format, dtype=dtype)
    return Draws(Case(Part(Role.EXPERTS, problem, "", 1), shape.tokens, "uniform", 0), shape.draws)


def roundings() -> Iterator[tuple[str, Rounding]]:
    """Where published kernels round, with the dtype of their tokens."""
    for dtype, own in (("bf16", Grid.BF16), ("f16", Grid.F16)):
        yield dtype, EXACT
        yield dtype, Rounding(product=own, inner=own, rows=own)
        yield dtype, Rounding(weights=own, product=own, inner=own, weighted=own)
    for grid in (Grid.FP8_TENSOR, Grid.FP8_TOKEN, Grid.FP8_GROUP, Grid.MXFP8, Grid.NVFP4):
        yield "bf16", Rounding(input=grid, inner=grid)
        yield "bf16", Rounding(input=grid, product=Grid.BF16, inner=grid, weighted=Grid.BF16)


def in_float32(rounding: Rounding) -> Kernel:
    """The reference's own steps with float32 sums."""

    def kernel(case: Case, inputs: Inputs) -> Tensor:
        assert isinstance(inputs, ExpertInputs)
        assert isinstance(case.part.problem, MoEProblem)
        out_TD = expert_layer(case.part.problem, inputs.weights, inputs.x_TD, inputs.routed, torch.float32, rounding)
        return out_TD.to(inputs.x_TD.dtype)

    return kernel


def one_after_the_other(_: Case, inputs: Inputs) -> Tensor:
    """The least exact order of a float32 sum: every column is added to all before it."""
    assert isinstance(inputs, LinearInputs)
    weight_NK = inputs.matrix.codes.float()
    total_TN = torch.zeros(len(inputs.x_TK), len(weight_NK))
    for x_T, w_N in zip(inputs.x_TK.T, weight_NK.T, strict=True):
        total_TN += x_T[:, None] * w_N
    return total_TN


def registered(name: str) -> Kernel:
    """A backend of ours."""

    def kernel(case: Case, inputs: Inputs) -> Tensor:
        candidate = Candidate.bind(case.part, name, inputs)
        out = candidate.out_like(case.tokens)
        candidate.run(out, Workspace())
        return out

    return kernel


if __name__ == "__main__":
    main()
