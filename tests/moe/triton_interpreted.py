"""Triton's expert layers on its interpreter; a program, since the interpreter is chosen at import.

Layers are as small as still has two steps along the columns and more than one tile: the interpreter takes milliseconds
for each program.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator

import torch

from muster.contract import Decline
from muster.device import Device
from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, Format, int4
from muster.lab.prove.tolerance import LIMITS, grade, rms, rounding_of
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem
from muster.moe.registry import backends
from muster.workspace import Workspace

from .cases import GPT_OSS, TILE_EDGES, Case, nothing_here, problem, sentinels, tile_edges
from .trial import Trial, run

NAMED = Device("9.0", "a GPU that is not here", 0, 0, present=False)


def small(format: Format, **fields) -> MoEProblem:  # type: ignore[no-untyped-def]
    """A layer of that format."""
    return problem(**{"hidden": 192, "inner": 64, "experts": 3, "dtype": "bf16", "weights": format, **fields})


CASES = {
    "bf16, limit": Case(small(BF16, activation=Activation("silu", limit=0.5)), tokens=5),
    "nvfp4, half a step of 64, tensor scale divides": Case(small(NVFP4, hidden=256), tokens=5, divides=True),
    "nvfp4, half a step of 16": Case(small(NVFP4, hidden=96, inner=32), tokens=1),
    "mxfp4 as in gpt-oss": Case(small(MXFP4, activation=GPT_OSS, bias=True), tokens=5),
    "int4-g32": Case(small(int4(32)), tokens=5),
    "int4-g32, symmetric": Case(small(int4(32), inner=32), tokens=3, symmetric=True),
    "int4-g128": Case(small(int4(128), hidden=256, inner=128), tokens=3),
    "fp8-tensor, second of two ranks": Case(small(FP8_TENSOR, experts=4, local=(2, 2)), tokens=7),
    "fp8-channel, gelu, bias, router weight on input": Case(
        small(FP8_CHANNEL, activation=Activation("gelu", limit=0.5), bias=True, on_input=True), tokens=5
    ),
    "fp8-block, swiglu-oai, bias, sentinel ids": Case(
        small(FP8_BLOCK, activation=GPT_OSS, bias=True), tokens=12, pattern=sentinels
    ),
    "fp8-channel, relu2, more slots than one launch groups": Case(
        small(FP8_CHANNEL, hidden=160, experts=10, top_k=1, activation=Activation("relu2")),
        tokens=sum(TILE_EDGES),
        pattern=tile_edges,
    ),
    "fp8-block, nothing but sentinel ids": Case(small(FP8_BLOCK), tokens=3, pattern=nothing_here),
    "fp8-block, zero tokens": Case(small(FP8_BLOCK), tokens=0),
}
GIVEN = {
    "triton_fused": tuple(CASES),
    "triton_w8a8": tuple(name for name in CASES if name.startswith("fp8-")),
    "triton": ("mxfp4 as in gpt-oss", "int4-g32", "fp8-tensor, second of two ranks"),
}
"""What each backend is given; `triton` differs from `triton_fused` in who groups the rows, and in nothing else."""


def declined(backend: str, case: Case) -> Decline | None:
    """What the backend says to the case on a GPU."""
    return backends().get(backend).supports(case.problem, NAMED)


def judged(backend: str) -> Iterator[tuple[str, str, dict[str, object]]]:
    """What came of each of its cases."""
    for name in GIVEN[backend]:
        case = CASES[name]
        trial = run(backend, case)
        limit = LIMITS[grade(rounding_of(backend, case.problem), "bf16")].of(case.tokens)
        errors = [rms(out, trial.truth_TD.to(out.dtype)) for out in trial.outs] if case.tokens else []
        yield (
            backend,
            name,
            {
                "accepted": all(whole <= limit.whole and worst <= limit.worst_token for whole, worst in errors),
                "errors": errors,
                "written": trial.unwritten == 0 and trial.guards_hurt == 0,
                "unchanged": trial.inputs_changed == (),
                "warm": trial.grown == 0,
                "same": all(torch.equal(trial.outs[0], other) for other in trial.outs),
                "contained": contained(trial) if case.tokens > 3 else True,
            },
        )


def contained(trial: Trial) -> bool:
    """Whether the NaN of one token and of another one's routing weight stay with them."""
    victims = torch.tensor([2, 3])
    x_TD, weights_TK = trial.inputs.x_TD.clone(), trial.inputs.routed.weights_TK.clone()
    x_TD[victims[0]] = math.nan
    weights_TK[victims[1]] = math.nan
    out_TD = torch.full_like(x_TD, math.nan)
    trial.experts.run(x_TD, Routed(trial.inputs.routed.ids_TK, weights_TK), out_TD, Workspace())
    others = torch.ones(len(x_TD), dtype=torch.bool).index_fill(0, victims, value=False)
    return torch.equal(out_TD[others], trial.outs[0][others])


if __name__ == "__main__":
    for backend in GIVEN:
        for found in judged(backend):
            sys.stdout.write(json.dumps(found) + "\n")
