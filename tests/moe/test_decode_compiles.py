"""`decode` compiles for every GPU it is declared for, spills nothing, and reads nothing too early."""

import re
import shutil
import subprocess

import pytest

pytest.importorskip("triton")

from muster.formats.spec import MXFP4, NVFP4
from muster.moe.kernels.decode_layer import SOURCE, constants
from muster.moe.kernels.nvrtc import options
from muster.moe.problem import MoEProblem, RoutingRule

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="needs nvcc")
BLOCKS = {"one token": (1, 10, False), "eight tokens": (1, 80, False), "lists of 16": (2, 500, True)}
"""Columns, blocks, and whether they are listed."""
formats = pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda entry: entry.name)


def built(kind, capability, given, folder):
    """What the compiler made and what it said."""
    made = folder / f"decode.{kind}"
    target = f"-gencode=arch=compute_{capability},code={'compute' if kind == 'ptx' else 'sm'}_{capability}"
    command = ["nvcc", f"-{kind}", target, "-Xptxas", "-v", *options(given), "-o", made, SOURCE]
    return made, subprocess.run(command, capture_output=True, text=True, check=True).stderr


def layer(format):
    return MoEProblem(4096, 1024, 512, RoutingRule(10), 512, weights=format)


@formats
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_products_of_one_token_spill_nothing_on_any_gpu(format, capability, tmp_path):
    for first in (True, False):
        given = constants(layer(format), *BLOCKS["one token"][:2], 10, listed=False, first=first)
        _, said = built("cubin", capability, given, tmp_path)
        assert set(re.findall(r"(\d+) bytes spill", said)) == {"0"}, said


@formats
@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_the_kernel_before_writes_is_read_after_it_is_over(format, blocks, tmp_path):
    columns, count, listed = BLOCKS[blocks]
    given = constants(layer(format), columns, count, 10, listed=listed, first=False)
    ptx, _ = built("ptx", 90, given, tmp_path)
    product, combine = ptx.read_text().split(".visible .entry")[1:]
    if "combine" in product.split("(")[0]:
        product, combine = combine, product
    weights = {"ld.global.nc.L1::no_allocate.u16", "ld.global.nc.L1::no_allocate.L2::128B.v4.u32"}
    lists = {"ld.global.u32", "ld.global.nc.u64"}  # complete before this kernel starts; and ids
    for entry, early in ((product, weights | lists), (combine, lists)):
        before, waited, after = entry.partition("griddepcontrol.wait")
        assert waited
        assert set(re.findall(r"ld\.global\S*", before)) <= early
        assert "ld.global" in after
