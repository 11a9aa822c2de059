"""Whole matrices: bytes computed by hand, round trips, edges, pieces."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import FormatError
from muster.formats.codec import block_amax, decode, encode
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import (
    BF16,
    F16,
    F32,
    FORMATS,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Element,
    int4,
)

RELATIVE_RMS_OF_GAUSSIAN = {
    "bf16": 0.003, "f16": 0.0004, "f32": 0.0, "nvfp4": 0.11, "mxfp4": 0.13, "fp8-tensor": 0.03, "fp8-channel": 0.03,
    "fp8-block": 0.03, "int4-g32": 0.09, "int4-g128": 0.12,
}  # fmt: skip


def relative_rms(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02)


def bytes_row(*values: int) -> torch.Tensor:
    return torch.tensor([values], dtype=torch.uint8)


def test_nvfp4_by_hand():
    codes = bytes_row(0x21, 0x43, 0x65, 0x87, 0xA9, 0xCB, 0xED, 0x0F)
    scale = Scale(torch.tensor([[0x40]], dtype=torch.uint8).view(torch.float8_e4m3fn), Element.E4M3)
    expected = [0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, 0.0]
    for meaning, value in ((Meaning.MULTIPLIES, 0.25), (Meaning.DIVIDES, 4.0)):
        matrix = QuantMatrix(NVFP4, (1, 16), codes, scale, Scale(torch.tensor([value]), Element.F32, meaning))
        assert decode(matrix).tolist() == [[x * 2.0 * 0.25 for x in expected]]


def test_a_dividing_scale_divides_exactly():
    codes = bytes_row(*[0x77] * 8)
    scale = Scale(torch.tensor([[448.0]]).to(torch.float8_e4m3fn), Element.E4M3)
    divisor = torch.tensor([3.0])
    matrix = QuantMatrix(NVFP4, (1, 16), codes, scale, Scale(divisor, Element.F32, Meaning.DIVIDES))
    assert decode(matrix)[0, 0] == torch.tensor(6.0 * 448.0) / 3.0
    assert decode(matrix, torch.float64)[0, 0] == 6.0 * 448.0 / 3.0
    divisor.fill_(2688.0 / 0.0371)
    expected = (torch.tensor(2688.0, dtype=torch.float64) / divisor.double()).float()
    assert decode(matrix)[0, 0] == expected


def test_mxfp4_by_hand():
    codes = bytes_row(0x21, *[0x00] * 14, 0xF0)
    matrix = QuantMatrix(MXFP4, (1, 32), codes, Scale(torch.tensor([[130]], dtype=torch.uint8), Element.E8M0))
    assert decode(matrix).tolist() == [[4.0, 8.0, *[0.0] * 29, -48.0]]


def test_int4_by_hand_with_act_order():
    codes = bytes_row(0x10, 0xF8)
    scale = Scale(torch.tensor([[0.5, 2.0]], dtype=torch.float16), Element.F16)
    zero = torch.tensor([[8, 1]], dtype=torch.uint8)
    matrix = QuantMatrix(int4(2), (1, 4), codes, scale, zero=zero)
    assert decode(matrix).tolist() == [[-4.0, -3.5, 14.0, 28.0]]
    shuffled = QuantMatrix(int4(2), (1, 4), codes, scale, zero=zero, order=torch.tensor([1, 0, 0, 1]).int())
    assert decode(shuffled).tolist() == [[-2.0, -3.5, 0.0, 28.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_blocks_may_be_partial_at_the_edges(dtype):
    rows, columns = 576, 200
    codes = torch.ones(rows, columns).to(torch.float8_e4m3fn)
    scale = torch.arange(1, 11).view(5, 2).to(dtype)
    element = Element.F32 if dtype == torch.float32 else Element.BF16
    values = decode(QuantMatrix(FP8_BLOCK, (rows, columns), codes, Scale(scale, element)))
    for row in (0, 127, 128, 511, 512, 575):
        for column in (0, 127, 128, 199):
            assert values[row, column] == scale[row // 128, column // 128]


def test_fp8_channel_and_tensor_scales():
    codes = torch.full((4, 2), 2.0).to(torch.float8_e4m3fn)
    channel = Scale(torch.tensor([[1.0], [2.0], [3.0], [4.0]]), Element.F32)
    assert decode(QuantMatrix(FP8_CHANNEL, (4, 2), codes, channel))[:, 0].tolist() == [2.0, 4.0, 6.0, 8.0]
    two_pieces = Scale(torch.tensor([[1.0], [10.0]]), Element.F32)
    assert decode(QuantMatrix(FP8_TENSOR, (4, 2), codes, two_pieces))[:, 1].tolist() == [2.0, 2.0, 20.0, 20.0]


def test_nvfp4_encodes_by_the_published_formula():
    weight = weights(8, 64)
    matrix = encode(weight, NVFP4, pieces=2)
    for piece, rows in enumerate((slice(0, 4), slice(4, 8))):
        tensor_scale = weight[rows].abs().max() / (6 * 448)
        assert matrix.global_scale.value[piece] == tensor_scale
        block = weight[rows].view(4, 4, 16).abs().amax(-1)
        expected = (block / (6 * tensor_scale)).clamp(2.0**-9, 448.0).to(torch.float8_e4m3fn)
        assert torch.equal(matrix.scale.value[rows].float(), expected.float())
    assert matrix.scale.value.float().max() == 448.0


def test_mxfp4_scale_is_two_binades_below_the_largest_magnitude():
    weight = torch.zeros(4, 32)
    weight[:, 0] = torch.tensor([6.0, 7.9, 4.0, 3.9])
    matrix = encode(weight, MXFP4)
    assert matrix.scale.value.flatten().tolist() == [127, 127, 127, 126]
    assert decode(matrix)[:, 0].tolist() == [6.0, 6.0, 4.0, 3.0]


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_encoding_stays_within_the_formats_error(format):
    weight = weights(3, 256, 384)
    matrix = encode(weight, format)
    decoded = decode(matrix, torch.float64)
    limit = RELATIVE_RMS_OF_GAUSSIAN[format.name]
    assert relative_rms(decoded, weight) <= limit
    worst = max(relative_rms(d, w) for d, w in zip(decoded.flatten(0, 1), weight.flatten(0, 1), strict=True))
    assert worst <= 1.6 * limit
    assert matrix.nbytes == 3 * format.bytes(256, 384)


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_nought_and_tiny_weights_decode_to_finite_values(format):
    assert decode(encode(torch.zeros(2, 128, 128), format)).abs().max() == 0
    for tiny in (1e-30, 1e-38, 1e-45):
        decoded = decode(encode(torch.full((128, 128), tiny), format))
        assert decoded.isfinite().all()
        assert decoded.abs().max() <= 2 * tiny


GRID = st.sampled_from([0.0, 0.5, -0.5, 1.0, -1.5, 2.0, 3.0, -4.0])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.sampled_from(["nvfp4", "mxfp4"]), st.integers(-20, 20))
def test_weights_on_the_grid_come_back_exactly(data, name, exponent):
    format = FORMATS[name]
    row = data.draw(st.lists(GRID, min_size=64, max_size=64))
    weight = torch.tensor([row, row[::-1]])
    weight[:, :: format.block[1]] = 6.0
    weight *= 2.0**exponent
    assert relative_rms(decode(encode(weight, format)), weight) < (1e-6 if format.global_scale else 1e-30)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.integers(1, 4), st.sampled_from(sorted(FORMATS)), st.floats(1e-6, 1e4), st.integers(0, 99))
def test_encoding_what_was_decoded_changes_nothing_once_scales_agree(rows, groups, name, size, seed):
    format = FORMATS[name]
    weight = weights(rows, 128 * groups, seed=seed) * size
    once = decode(encode(weight, format), torch.float64)
    twice = decode(encode(once.float(), format), torch.float64)
    limit = 1e-6 if name not in ("nvfp4", "int4-g32", "int4-g128", "mxfp4") else RELATIVE_RMS_OF_GAUSSIAN[name]
    assert relative_rms(twice, once) <= limit


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(0, 9))
def test_block_amax_covers_every_element_once(rows, columns, seed):
    weight = weights(rows, columns, seed=seed)
    found = block_amax(weight, (128, 128))
    for i in range(found.shape[0]):
        for j in range(found.shape[1]):
            assert found[i, j] == weight[128 * i : 128 * i + 128, 128 * j : 128 * j + 128].abs().max()


@pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8_BLOCK, FP8_TENSOR, FP8_CHANNEL, int4(32)], ids=str)
def test_a_stack_encodes_as_its_matrices(format):
    weight = weights(4, 160, 192)
    stacked = encode(weight, format)
    for expert in range(4):
        assert torch.equal(decode(stacked[expert]), decode(encode(weight[expert], format)))


def test_float64_decoding_is_exact_where_float32_rounds_once():
    matrix = encode(weights(64, 256), NVFP4)
    exact = decode(matrix, torch.float64)
    assert torch.equal(decode(matrix), exact.float())
    assert torch.equal(decode(matrix, torch.bfloat16), exact.float().bfloat16())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("format", [NVFP4, MXFP4, FP8_BLOCK, BF16], ids=str)
def test_weights_that_are_no_numbers_are_refused_with_their_place(format, bad):
    weight = weights(128, 128)
    weight[3, 5] = bad
    with pytest.raises(FormatError, match=r"1 not finite, the first at \(3, 5\)"):
        encode(weight, format)


def test_what_a_format_cannot_cut_or_hold_is_refused():
    with pytest.raises(FormatError, match="a multiple of 16"):
        encode(weights(4, 24), NVFP4)
    with pytest.raises(FormatError, match="a multiple of 32"):
        encode(weights(4, 48), MXFP4)
    with pytest.raises(FormatError, match="2 equal row pieces"):
        encode(weights(3, 32), NVFP4, pieces=2)
    with pytest.raises(FormatError, match="no tensor scale"):
        encode(weights(4, 32), MXFP4, pieces=2)
    with pytest.raises(FormatError, match="f16"):
        encode(torch.full((1, 1), 1e6), F16)


def test_plain_formats_round_to_nearest():
    weight = weights(16, 16)
    assert torch.equal(decode(encode(weight, F32)), weight)
    assert torch.equal(encode(weight, BF16).codes, weight.bfloat16())
    plain = QuantMatrix.plain(weight.bfloat16())
    assert plain.format is BF16
    decode(plain).zero_()
    assert torch.equal(plain.codes, weight.bfloat16())
