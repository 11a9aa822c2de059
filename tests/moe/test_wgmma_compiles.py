"""Every shape of `wgmma` compiles for Hopper as meant: nothing spilled, no product serialised, room for programs."""

import re
import shutil
import subprocess

import pytest

pytest.importorskip("triton")

from muster.formats.spec import MXFP4, NVFP4
from muster.moe.kernels.fragments import format_constants
from muster.moe.kernels.nvrtc import options
from muster.moe.kernels.wgmma_layer import SHAPES, TARGET, constants, source
from muster.moe.problem import Activation, MoEProblem, RoutingRule

SHARED = 227 << 10
"""Bytes of a multiprocessor for programs, of which each takes 1 KB for itself (CUDA programming guide, 9.0)."""
GPT_OSS = MoEProblem(
    2880, 2880, 128, RoutingRule(4), 128, weights=MXFP4, activation=Activation("swiglu-oai", limit=7.0), bias=True
)
PLAIN = MoEProblem(4096, 1024, 512, RoutingRule(10), 512, weights=NVFP4)

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")


@pytest.mark.parametrize(
    ("problem", "shape"),
    [*((PLAIN, shape) for shape in SHAPES), (GPT_OSS, SHAPES[1])],
    ids=lambda given: f"{given.most} rows" if given in SHAPES else given.weights.name,
)
def test_every_shape_compiles_without_spills_or_serialised_products_and_its_programs_fit(problem, shape, tmp_path):
    unit = format_constants(problem.weights)["UNIT"]
    for first in (True, False):
        said = compiled(source(shape), constants(problem, shape, first=first), tmp_path)
        assert re.findall(r"(\d+) bytes spill", said) == ["0", "0"], said
        assert "serialized" not in said
        declared = int(re.search(r"(\d+) bytes smem", said)[1])
        assert (shape.shared(unit, first=first) + declared + 1024) * shape.resident <= SHARED
        registers = int(re.search(r"Used (\d+) registers", said)[1])
        assert registers * shape.threads * shape.resident <= 1 << 16


def compiled(text, given, folder):
    """What the assembler says of the kernel."""
    kernel = folder / "kernel.cu"
    kernel.write_text(text)
    target = f"-gencode=arch=compute_{TARGET},code=sm_{TARGET}"
    command = ["nvcc", "-cubin", target, "-Xptxas", "-v", *options(given), "-o", folder / "kernel.cubin", kernel]
    return subprocess.run(command, capture_output=True, text=True, check=True).stderr
