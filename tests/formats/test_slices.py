"""A rank's share of a matrix decodes to the share of what the matrix decodes to."""

from dataclasses import replace

import pytest
import torch

from muster.errors import FormatError
from muster.formats.codec import decode, encode
from muster.formats.slices import take_columns, take_rows
from muster.formats.spec import BF16, FORMATS, FP8_BLOCK, FP8_TENSOR, NVFP4, int4


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize("cut", [(0, 128), (128, 256), (0, 256)])
def test_a_share_decodes_to_the_share(format, cut):
    weight = torch.randn(3, 512, 256, generator=torch.Generator().manual_seed(0))
    matrix = encode(weight, format, 2 if format in (NVFP4, FP8_TENSOR) else 1)
    whole, share = decode(matrix), slice(*cut)
    rows = take_rows(matrix, *cut, pieces=2)
    assert torch.equal(decode(rows), torch.cat([half[:, share] for half in whole.chunk(2, 1)], 1))
    assert torch.equal(decode(take_columns(matrix, *cut)), whole[..., share])
    assert rows.shape == (3, 2 * (cut[1] - cut[0]), 256)


@pytest.mark.parametrize(
    ("format", "axis", "cut"),
    [(FP8_BLOCK, 0, (0, 64)), (FP8_BLOCK, 1, (64, 256)), (NVFP4, 1, (0, 24)), (int4(32), 1, (16, 256))],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_a_cut_inside_a_block_is_refused(format, axis, cut):
    matrix = encode(torch.randn(256, 256), format)
    with pytest.raises(FormatError, match="cut"):
        (take_columns if axis else take_rows)(matrix, *cut)


def test_act_order_columns_cannot_be_shared_out():
    matrix = replace(encode(torch.randn(8, 64), int4(32)), order=torch.arange(64, dtype=torch.int32).flip(0) // 32)
    with pytest.raises(FormatError, match="act-order"):
        take_columns(matrix, 0, 32)


def test_odd_rows_of_a_plain_matrix_may_be_cut_anywhere():
    weight = torch.randn(7, 5).bfloat16()
    matrix = encode(weight, BF16)
    assert torch.equal(take_rows(matrix, 2, 5).codes, weight[2:5])
    assert torch.equal(take_columns(matrix, 1, 4).codes, weight[:, 1:4])
