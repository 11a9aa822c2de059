"""Every code of every element, by every way of decoding it, against `formats.codec`."""

import math
from dataclasses import replace
from functools import cache

import pytest
import torch

from muster.formats.codec import decode, encode
from muster.formats.matrix import QuantMatrix, Scale
from muster.formats.spec import (
    BF16,
    F32,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Element,
    Format,
    int4,
)
from muster.native import rows
from muster.native.jit import F32 as FLOAT
from muster.native.jit import PORTABLE, Emitter, Kernel, Target, host

FORMATS = (BF16, F32, NVFP4, MXFP4, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, int4(32), int4(64), int4(128))
TARGETS = pytest.mark.parametrize("target", [host(), PORTABLE], ids=["host", "portable"])


def dots(matrix: QuantMatrix, x_TK: torch.Tensor, target: Target, width: int = 4) -> torch.Tensor:
    """`x @ matrix.T` on one thread, by a kernel that takes strips of `width` vectors."""
    data = rows.RowData.of(matrix)
    layout = rows.Rows.of(matrix, data)
    x_TK = x_TK[:, torch.tensor(_order(matrix.shape[1]))] if layout.packed else x_TK
    out_TN = torch.full((len(x_TK), matrix.shape[0]), math.nan)
    for x, out in zip(x_TK.contiguous().split(width), out_TN.split(width), strict=True):
        kernel(layout, len(x), target)(x.data_ptr(), out.data_ptr(), *data.addresses)
    return out_TN


@cache
def kernel(layout: rows.Rows, width: int, target: Target) -> Kernel:
    e = Emitter("dots", target)
    x, out = e.argument(0), e.argument(1)
    operands = rows.Operands.of(e, 2)
    vectors = [x + 4 * layout.columns * t for t in range(width)]
    with e.loop(0, layout.rows) as n:
        total = layout.total(operands, n)
        for t, dot in enumerate(layout.dots(layout.row(operands, n), vectors)):
            e.store(dot if total is None else dot * total, out + (n + t * layout.rows) * FLOAT.bytes)
    return e.compile()


def _order(columns: int) -> list[int]:
    return [start + place for start in range(0, columns, rows.BLOCK) for place in rows.PACKED_ORDER]


def test_packed_order_is_a_permutation() -> None:
    assert sorted(rows.PACKED_ORDER) == list(range(rows.BLOCK))


@TARGETS
@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_each_column_is_decoded_bit_for_bit(format: Format, target: Target) -> None:
    """A unit vector picks one column, and all else is times nought."""
    columns = 192 if format.family != "int4" else 256
    matrix = encode(torch.randn(5, columns, generator=torch.Generator().manual_seed(1)), format)
    units_KK = torch.eye(columns)
    picked_KN = dots(matrix, units_KK, target)
    codes = matrix if format.family not in ("nvfp4", "fp8-tensor", "fp8-channel") else _without_total(matrix)
    totals = rows.RowData.of(matrix).totals
    exact_NK = decode(codes) * totals.expand(5)[:, None] if totals.numel() else decode(codes)
    assert torch.equal(picked_KN.T, exact_NK)


def _without_total(matrix: QuantMatrix) -> QuantMatrix:
    name = "global_scale" if matrix.format is NVFP4 else "scale"
    scale = matrix.scales[name]
    return replace(matrix, **{name: replace(scale, value=torch.ones_like(scale.value))})


@TARGETS
@pytest.mark.parametrize("element", [Element.E2M1, Element.E4M3, Element.UINT4])
def test_every_code_of_the_element(element: Element, target: Target) -> None:
    count = 1 << element.bits
    if element is Element.E4M3:
        codes = torch.arange(count, dtype=torch.uint8)
        codes[[0x7F, 0xFF]] = 0
        codes = codes.view(torch.float8_e4m3fn).view(1, 256)
        matrix = QuantMatrix(FP8_CHANNEL, (1, 256), codes, Scale(torch.ones(1, 1), Element.F32))
    elif element is Element.E2M1:
        low = torch.arange(16, dtype=torch.uint8)
        packed = (low[None] | low[:, None] << 4).flatten()[None]
        matrix = QuantMatrix(MXFP4, (1, 512), packed, Scale(torch.full((1, 16), 127, dtype=torch.uint8), Element.E8M0))
    else:
        low = torch.arange(16, dtype=torch.uint8)
        packed = (low[None] | low[:, None] << 4).flatten()[None]
        zero = torch.full((1, 16), 3, dtype=torch.uint8)
        matrix = QuantMatrix(int4(32), (1, 512), packed, Scale(torch.ones(1, 16), Element.F32), zero=zero)
    columns = matrix.shape[1]
    units_KK = torch.eye(columns)
    assert torch.equal(dots(matrix, units_KK, target).T, decode(matrix))


@TARGETS
def test_every_block_scale_code_of_nvfp4_and_mxfp4(target: Target) -> None:
    e4m3 = torch.arange(0x7F, dtype=torch.uint8)[:124].view(1, 124)
    ones = torch.full((1, 124 * 8), 0x22, dtype=torch.uint8)
    nvfp4 = QuantMatrix(
        NVFP4,
        (1, 124 * 16),
        ones,
        Scale(e4m3.view(torch.float8_e4m3fn), Element.E4M3),
        Scale(torch.ones(1), Element.F32),
    )
    first_of_block = torch.eye(124 * 16)[::16]
    assert torch.equal(dots(nvfp4, first_of_block, target).T, decode(nvfp4)[:, ::16])

    e8m0 = torch.arange(254, dtype=torch.uint8).view(1, 254)
    mxfp4 = QuantMatrix(
        MXFP4, (1, 254 * 32), torch.full((1, 254 * 16), 0x22, dtype=torch.uint8), Scale(e8m0, Element.E8M0)
    )
    for block in range(0, 254, 23):
        unit = torch.zeros(1, 254 * 32)
        unit[0, block * 32 + 5] = 1
        assert dots(mxfp4, unit, target).item() == decode(mxfp4)[0, block * 32 + 5].item()


@pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)
def test_a_dot_product_does_not_depend_on_its_company(format: Format) -> None:
    matrix = encode(torch.randn(3, 384, generator=torch.Generator().manual_seed(2)), format)
    x_TK = torch.randn(4, 384, generator=torch.Generator().manual_seed(3))
    assert torch.equal(dots(matrix, x_TK, host(), width=4), dots(matrix, x_TK, host(), width=1))


def test_what_is_only_viewed_costs_nothing() -> None:
    assert rows.RowData.of(encode(torch.randn(64, 128), BF16)).nbytes == 0
    assert rows.RowData.of(encode(torch.randn(64, 128), NVFP4)).nbytes <= 4


@pytest.mark.parametrize(
    ("format", "word"), [(Format("f16", Element.F16), "f16"), (int4(16), "groups"), (int4(96), "groups")]
)
def test_formats_it_cannot_read_are_named(format: Format, word: str) -> None:
    reason = rows.why_not(format)
    assert reason is not None
    assert word in reason
