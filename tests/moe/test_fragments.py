"""The order of the fragments: what the kernels do with a lane's words, done in torch, gives the weights back."""

from dataclasses import replace

import pytest
import torch

from muster.formats.codec import decode, decode_e2m1, encode
from muster.formats.rounding import Grid, round_weights
from muster.formats.spec import FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4
from muster.moe.kernels.fragments import _BYTES, Fragments, format_constants

SIGN, REST = 0x8000, 0x01C0


def half_words(words):
    """The four pairs of each word, as `decode` shifts and masks them: `[..., 4 fragments, 2]` half-words."""
    words = words.to(torch.int64) & 0xFFFFFFFF
    both = SIGN << 16 | SIGN, REST << 16 | REST
    fragments = [
        words & (both[0] | both[1]),
        (words << 3) & (both[0] | both[1]),
        ((words << 6) & both[1]) | ((words << 2) & both[0]),
        ((words >> 3) & both[1]) | ((words << 1) & both[0]),
    ]
    stacked = torch.stack(fragments, dim=-1)
    return torch.stack((stacked & 0xFFFF, (stacked >> 16) & 0xFFFF), dim=-1)


def values(fragments, format, gated):
    """`[L, N, K]`, tensor scales not applied; each by way of the half-words that the kernels make."""
    experts, tiles, chunks = fragments.units.shape[:3]
    given = format_constants(format)
    lanes = 32 // given["SCALE_SHARE"]
    warps = [
        part.reshape(experts, tiles, chunks, 4, -1).transpose(2, 3).reshape(experts, tiles * 4, chunks, -1)
        for part in fragments.units.split([2048, given["UNIT"] - 2048], dim=-1)
    ]
    tiles *= 4
    halves = half_words(warps[0].contiguous().view(torch.int32).view(experts, tiles, chunks, 32, 4))
    codes = decode_e2m1((((halves & SIGN) >> 12) | ((halves & REST) >> 6)).to(torch.uint8)).double() * 2.0**-126
    step, base = (int(str(given[name]).rstrip("u"), 0) & 0xFFFF for name in ("SCALE_STEP", "SCALE_BASE"))
    bits = (warps[1].reshape(experts, tiles, chunks, lanes, 2).to(torch.int32) * step + base) << 16
    scales = bits.view(torch.float32).double().repeat_interleave(given["SCALE_SHARE"], dim=3)
    # expert, tile, chunk, g, t, word, pair, half-row, place
    by_lane = codes.view(experts, tiles, chunks, 8, 4, 4, 2, 2, 2) * scales.view(
        experts, tiles, chunks, 8, 4, 1, 1, 2, 1
    )
    return in_rows(by_lane.permute(0, 1, 7, 3, 2, 4, 5, 6, 8), gated)


def in_rows(by_tile, gated):
    """`[L, N/16, half-row, g, chunk, ...]` as `[L, N, K]`."""
    experts, tiles, _, _, chunks = by_tile.shape[:5]
    by_row = by_tile.reshape(experts, tiles, 2, 8, chunks * 64)
    if gated:
        # gate or up, chunk of 64 rows, two of each sixteen
        by_row = by_row.transpose(1, 2).reshape(experts, 2, tiles // 8, 8, 4, 2, chunks * 64).transpose(3, 4)
    return by_row.reshape(experts, tiles * 16, chunks * 64)


@pytest.mark.parametrize("format", [NVFP4, MXFP4], ids=lambda entry: entry.name)
@pytest.mark.parametrize("gated", [True, False])
def test_fragments_hold_every_weight_exactly(gated, format):
    weight = torch.randn(3, 128, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 192)
    matrix = encode(weight, format, pieces=2 if format is NVFP4 and gated else 1)
    fragments = Fragments.of(matrix, gated=gated)
    pieces = fragments.tensor_scales.shape[1]
    tensor_scales = fragments.tensor_scales.repeat_interleave(128 // pieces, dim=1)[:, :, None].double() * 256
    assert torch.equal(values(fragments, format, gated) * tensor_scales, decode(matrix, torch.float64))


def test_scale_of_nought_gives_noughts():
    matrix = encode(torch.ones(1, 64, 64), NVFP4)
    matrix.scale.value.view(torch.uint8)[0, 3, 2] = 0
    found = values(Fragments.of(matrix, gated=False), NVFP4, False)
    assert (found[0, 3, 32:48] == 0).all()
    assert (found[0, 3, :32] != 0).all()


def e4m3_values(fragments, format, gated):
    """As `values`, of FP8 weights; scales of rows or matrices not applied."""
    experts, tiles, chunks = fragments.units.shape[:3]
    planes = fragments.units[..., :4096].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = planes.view(experts, tiles, chunks, 2, 4, 8, 4, 4)  # half-row, warp, g, t, word
    sign, rest = 0x80008000, 0x07F007F0
    pairs = [(words & sign) | ((words >> 4) & rest), ((words << 8) & sign) | ((words << 4) & rest)]
    halves = torch.stack([(pair >> shift) & 0xFFFF for pair in pairs for shift in (0, 16)], dim=-1)
    by_lane = (halves << 16).to(torch.int32).view(torch.float32).double() * 2.0**120
    if format is FP8_BLOCK:
        scales = fragments.units[..., 4096:].contiguous().view(torch.float32)[..., :2].double()
        by_lane *= scales.view(experts, tiles, chunks, 2, 1, 1, 1, 1, 1)
    by_tile = by_lane.permute(0, 1, 4, 3, 5, 2, 6, 7, 8).reshape(experts, tiles * 4, 2, 8, chunks, 64)
    return in_rows(by_tile, gated)


@pytest.mark.parametrize("format", [FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK], ids=lambda entry: entry.name)
@pytest.mark.parametrize("gated", [True, False])
def test_fragments_hold_every_fp8_weight_exactly(gated, format):
    weight = torch.randn(3, 256, 384, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 384)
    matrix = encode(weight, format, pieces=2 if format is FP8_TENSOR and gated else 1)
    fragments = Fragments.of(matrix, gated=gated)
    scales = fragments.tensor_scales.repeat_interleave(256 // fragments.tensor_scales.shape[1], dim=1)
    found = e4m3_values(fragments, format, gated) * scales[:, :, None].double()
    assert torch.equal(found, decode(matrix, torch.float64))


def test_a_code_that_is_no_number_shows():
    matrix = encode(torch.ones(1, 128, 128), FP8_CHANNEL)
    matrix.codes.view(torch.uint8)[0, 5, 7] = 0x7F
    scales = Fragments.of(matrix, gated=False).tensor_scales
    assert scales[0, 5].isnan()
    assert scales.isnan().sum() == 1


def test_codes_that_choose_bytes_are_every_weight_rounded_once():
    weight = torch.randn(2, 128, 192, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 1, 192)
    matrix = encode(weight, NVFP4, pieces=2)
    fragments = Fragments.of(matrix, gated=True, e4m3=True)
    experts, tiles, chunks = fragments.units.shape[:3]
    words = fragments.units[..., :2048].contiguous().view(torch.int32).long() & 0xFFFFFFFF
    words = words.view(experts, tiles, chunks, 4, 8, 4, 2, 2)  # warp, g, t, product, half-row
    scales = fragments.units[..., 2048:].view(experts, tiles, chunks, 4, 8, 4, 1, 2).int()
    steps = ((1 + (scales & 7) / 8) * torch.exp2((scales >> 3) - 10.0) / 8).double()
    columns = torch.empty(*words.shape, 2, 4, dtype=torch.float64)
    for half in range(2):
        for byte, column in enumerate(_BYTES):
            magnitude = words >> (16 * half + 4 * byte) & 7
            sign = words >> (8 * byte + (3 if half else 7)) & 1
            columns[..., half, column] = decode_e2m1((magnitude | sign << 3).to(torch.uint8)).double() * steps
    by_tile = columns.permute(0, 1, 3, 7, 4, 2, 5, 6, 8, 9).reshape(experts, tiles * 4, 2, 8, chunks, 64)
    found = in_rows(by_tile, True).to(torch.float8_e4m3fn).double() * 8
    assert torch.equal(found, round_weights(replace(matrix, global_scale=None), Grid.FP8_EIGHTH))
