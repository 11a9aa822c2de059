"""Every shape of `wgmma` compiles for Hopper as meant: nothing spilled, no product serialised, room for programs."""

import pytest

pytest.importorskip("triton")

from muster.formats.spec import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4
from muster.moe.kernels.wgmma_layer import TARGET, constants, shapes_for, source
from muster.moe.problem import Activation, MoEProblem, RoutingRule

from .compiler import build

SHARED = 227 << 10
"""Bytes of a multiprocessor for programs, of which each takes 1 KB for itself (CUDA programming guide, 9.0)."""
GPT_OSS = MoEProblem(
    2880, 2880, 128, RoutingRule(4), 128, weights=MXFP4, activation=Activation("swiglu-oai", limit=7.0), bias=True
)
PLAIN = {
    format.name: MoEProblem(4096, 1024, 512, RoutingRule(10), 512, weights=format)
    for format in (NVFP4, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR)
}
E4M3 = [
    pytest.param(PLAIN[name], first, id=f"{name}, {first.most} rows")
    for name in ("nvfp4", "fp8-block", "fp8-channel")
    for first, _ in shapes_for(PLAIN[name].weights, e4m3=True)
]
CASES = [
    *((problem, pair) for problem in PLAIN.values() for pair in shapes_for(problem.weights)),
    (GPT_OSS, shapes_for(MXFP4)[1]),
]


@pytest.mark.parametrize(
    ("problem", "pair"), CASES, ids=[f"{problem.weights.name}, {pair[0].most} rows" for problem, pair in CASES]
)
def test_every_shape_compiles_without_spills_or_serialised_products_and_its_programs_fit(problem, pair):
    assert pair[0].most == pair[1].most
    for first, shape in zip((True, False), pair, strict=True):
        compiles_as_meant(problem, shape, first=first)


@pytest.mark.parametrize(("problem", "shape"), E4M3)
def test_every_shape_for_tokens_in_e4m3_compiles_likewise(problem, shape):
    compiles_as_meant(problem, shape, first=True, e4m3=True)


def compiles_as_meant(problem, shape, **kind):
    given = constants(problem, shape, **kind)
    built = build(source(shape, e4m3=kind.get("e4m3", False)), TARGET, given)
    assert built.stack == 0, built.said
    assert "serialized" not in built.said, built.said
    (declared,), (registers,) = built.numbers(r"(\d+) bytes smem"), built.numbers(r"Used (\d+) registers")
    assert (shape.shared(given["UNIT"], **kind) + declared + 1024) * shape.resident <= SHARED
    assert registers * shape.threads * shape.resident <= 1 << 16
