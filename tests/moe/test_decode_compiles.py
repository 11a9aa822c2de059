"""`decode` compiles for every GPU it is declared for, spills nothing, and reads nothing too early."""

import re

import pytest

pytest.importorskip("triton")

from muster.formats.spec import FP8_BLOCK, FP8_CHANNEL, MXFP4, NVFP4
from muster.moe.kernels.decode_layer import constants, source
from muster.moe.problem import MoEProblem, RoutingRule

from .compiler import build

BLOCKS = {
    "one token": (1, 10, False),
    "eight tokens": (1, 80, False),
    "lists of 8": (1, 500, True),
    "lists of 16": (2, 500, True),
    "lists of 32": (4, 1000, True),
}
"""Eights of token rows, blocks, and whether they are listed."""
PARKED = {("nvfp4", "lists of 8", 120): 8}
"""Bytes of a thread's stack that are no spill: there the assembler puts one value by, ahead of the loop."""
formats = pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8_BLOCK, FP8_CHANNEL], ids=lambda entry: entry.name)


def made(format, blocks, target, *, first, inner=1024):
    columns, count, listed = BLOCKS[blocks]
    layer = MoEProblem(4096, inner, 512, RoutingRule(10), 512, weights=format)
    return build(source(), str(target), constants(layer, columns, count, 10, listed=listed, first=first))


@formats
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
@pytest.mark.parametrize("blocks", BLOCKS)
def test_products_spill_nothing_on_any_gpu(format, blocks, capability):
    for first, inner in ((True, 1024), (False, 1024), (False, 128)):
        built = made(format, blocks, capability, first=first, inner=inner)
        assert built.stack <= PARKED.get((format.name, blocks, capability), 0), built.said


@formats
@pytest.mark.parametrize("blocks", BLOCKS)
def test_what_the_kernel_before_writes_is_read_after_it_is_over(format, blocks):
    product, combine = made(format, blocks, 90, first=False).ptx.split(".visible .entry")[1:]
    if "combine" in product.split("(")[0]:
        product, combine = combine, product
    weights = {
        "ld.global.nc.L1::no_allocate.u16",
        "ld.global.nc.L1::no_allocate.L2::128B.v4.u32",
        "ld.global.nc.v2.f32",  # scales of blocks
    }
    lists = {"ld.global.u32", "ld.global.nc.u64"}  # complete before this kernel starts; and ids
    for entry, early in ((product, weights | lists), (combine, lists)):
        before, waited, after = entry.partition("griddepcontrol.wait")
        assert waited
        assert set(re.findall(r"ld\.global\S*", before)) <= early
        assert "ld.global" in after
