"""Reading and writing each dialect: bytes by hand, round trips, and every scale that must be refused."""

import subprocess
import sys

import pytest
import torch

from muster.errors import FormatError
from muster.formats import layouts
from muster.formats.codec import decode, encode
from muster.formats.dialects import Dialect, detect, disk_shape, format_of, read, shape_of, write
from muster.formats.matrix import Meaning, QuantMatrix, Scale, concat_rows
from muster.formats.spec import (
    BF16,
    FP8_BLOCK,
    FP8_CHANNEL,
    FP8_TENSOR,
    MXFP4,
    NVFP4,
    Element,
    int4,
)

WRITABLE = [
    (Dialect.PLAIN, BF16),
    (Dialect.MODELOPT_NVFP4, NVFP4),
    (Dialect.CT_NVFP4, NVFP4),
    (Dialect.GPT_OSS_MXFP4, MXFP4),
    (Dialect.CT_MXFP4, MXFP4),
    (Dialect.FP8_BLOCK, FP8_BLOCK),
    (Dialect.MODELOPT_FP8, FP8_TENSOR),
    (Dialect.MODELOPT_FP8, FP8_CHANNEL),
    (Dialect.MODELOPT_FP8, FP8_BLOCK),
    (Dialect.CT_FP8, FP8_TENSOR),
    (Dialect.CT_FP8, FP8_CHANNEL),
    (Dialect.CT_FP8, FP8_BLOCK),
    (Dialect.CT_INT4, int4(32)),
    (Dialect.GPTQ, int4(64)),
    (Dialect.GPTQ_V2, int4(32)),
    (Dialect.AWQ, int4(128)),
]
NAME = "model.layers.3.mlp.experts"


def weights(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).mul_(0.02)


def matrix_for(dialect: Dialect, format, *lead: int, rows: int = 576) -> QuantMatrix:
    divides = any(part.divides for part in dialect.parts)
    return encode(weights(*lead, rows, 384), format, tensor_scale=Meaning.DIVIDES if divides else Meaning.MULTIPLIES)


def headers(parts):
    return {name: layouts.header(tensor) for name, tensor in parts.items()}


@pytest.mark.parametrize("lead", [(), (3,)], ids=["one", "stacked"])
@pytest.mark.parametrize(("dialect", "format"), WRITABLE, ids=lambda value: getattr(value, "name", None))
def test_what_is_written_is_read_back_exactly(dialect, format, lead):
    matrix = matrix_for(dialect, format, *lead)
    parts = write(matrix, dialect)
    for part in dialect.parts:
        if part.name in parts:
            assert tuple(parts[part.name].shape) == disk_shape(dialect, part, matrix.shape, format)
            assert layouts.header(parts[part.name]).dtype in part.dtypes
            assert parts[part.name].is_contiguous()
    back = read(dialect, parts, matrix.shape, NAME)
    assert torch.equal(decode(back), decode(matrix))
    assert torch.equal(back.codes.view(torch.uint8), matrix.codes.view(torch.uint8))
    for name, tensor in write(back, dialect).items():
        assert torch.equal(tensor.flatten().view(torch.uint8), parts[name].flatten().view(torch.uint8)), name


@pytest.mark.parametrize(("dialect", "format"), WRITABLE, ids=lambda value: getattr(value, "name", None))
def test_headers_alone_tell_dialect_format_and_shape(dialect, format):
    matrix = matrix_for(dialect, format)
    found = headers(write(matrix, dialect))
    same_on_disk = {Dialect.GPTQ_V2: Dialect.GPTQ}
    assert detect(found) is same_on_disk.get(dialect, dialect)
    assert format_of(dialect, found) == format
    assert shape_of(dialect, found) == matrix.shape


def test_headers_of_no_dialect_are_none():
    assert detect({"weight": layouts.header(torch.zeros(2, 2, dtype=torch.uint8))}) is None
    assert detect({}) is None


def test_the_table_needs_no_torch():
    code = "import sys; from muster.formats.dialects import Dialect; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_both_nvfp4_dialects_by_hand():
    codes = torch.tensor([[0x21] * 8], dtype=torch.uint8)
    scale = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    modelopt = read(
        Dialect.MODELOPT_NVFP4,
        {
            "weight": codes,
            "weight_scale": scale,
            "weight_scale_2": torch.tensor(0.25),
            "input_scale": torch.tensor(0.5),
        },
        (1, 16),
        NAME,
    )
    assert decode(modelopt)[0, :2].tolist() == [0.25, 0.5]
    assert modelopt.input_scale.value.tolist() == [0.5]
    theirs = {"weight_packed": codes, "weight_scale": scale, "weight_global_scale": torch.tensor([4.0])}
    compressed = read(Dialect.CT_NVFP4, theirs, (1, 16), NAME)
    assert decode(compressed)[0, :2].tolist() == [0.25, 0.5]
    assert compressed.global_scale.meaning is Meaning.DIVIDES
    assert compressed.global_scale.dialect == "compressed-tensors-nvfp4"


def test_a_scale_changes_meaning_without_its_payload_being_touched():
    matrix = matrix_for(Dialect.MODELOPT_NVFP4, NVFP4)
    theirs = write(matrix, Dialect.CT_NVFP4)
    assert torch.equal(theirs["weight_packed"], matrix.codes)
    assert torch.equal(theirs["weight_global_scale"], matrix.global_scale.value.reciprocal())
    back = decode(read(Dialect.CT_NVFP4, theirs, matrix.shape, NAME))
    assert float((back - decode(matrix)).norm() / back.norm()) < 1e-7


def test_gpt_oss_blocks_by_hand():
    blocks = torch.zeros(2, 1, 2, 16, dtype=torch.uint8)
    blocks[1, 0, 1, 0] = 0x21
    scales = torch.full((2, 1, 2), 127, dtype=torch.uint8)
    scales[1, 0, 1] = 129
    values = decode(read(Dialect.GPT_OSS_MXFP4, {"blocks": blocks, "scales": scales}, (2, 1, 64), NAME))
    assert values.nonzero().tolist() == [[1, 0, 32], [1, 0, 33]]
    assert values[1, 0, 32:34].tolist() == [2.0, 4.0]
    assert Dialect.GPT_OSS_MXFP4.tensor_name("m.gate_up_proj", "blocks") == "m.gate_up_proj_blocks"


def test_scale_inv_multiplies_and_may_be_bf16_or_e8m0():
    codes = torch.ones(130, 130).to(torch.float8_e4m3fn)
    for scale in (torch.full((2, 2), 4.0), torch.full((2, 2), 4.0).bfloat16(), torch.full((2, 2), 129).byte()):
        stored = scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale
        matrix = read(Dialect.FP8_BLOCK, {"weight": codes, "weight_scale_inv": stored}, (130, 130), NAME)
        assert decode(matrix).unique().tolist() == [4.0]
        assert write(matrix, Dialect.FP8_BLOCK)["weight_scale_inv"].dtype == stored.dtype


def words(nibbles) -> torch.Tensor:
    """Eight 4-bit values, the first in the lowest bits, as a signed 32-bit word."""
    value = sum(nibble << 4 * place for place, nibble in enumerate(nibbles))
    return value - (1 << 32) if value >= 1 << 31 else value


def test_compressed_tensors_int4_by_hand():
    packed = torch.tensor([[words([0, 1, 2, 3, 4, 5, 8, 15])]] * 8, dtype=torch.int32)
    scale = torch.full((8, 1), 0.5).bfloat16()
    for dtype in (torch.int32, torch.int64):
        parts = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([8, 8], dtype=dtype)}
        symmetric = decode(read(Dialect.CT_INT4, parts, (8, 8), NAME))
        assert symmetric[0].tolist() == [-4.0, -3.5, -3.0, -2.5, -2.0, -1.5, 0.0, 3.5]
    parts["weight_zero_point"] = torch.tensor([[words(range(8))]], dtype=torch.int32)
    asymmetric = decode(read(Dialect.CT_INT4, parts, (8, 8), NAME))
    assert asymmetric[:, 7].tolist() == [(15 - row) / 2 for row in range(8)]
    parts["weight_shape"] = torch.tensor([8, 16])
    with pytest.raises(FormatError, match=r"weight_shape: found \[8, 16\], expected \[8, 8\]"):
        read(Dialect.CT_INT4, parts, (8, 8), NAME)


@pytest.mark.parametrize(("dialect", "offset"), [(Dialect.GPTQ, 1), (Dialect.GPTQ_V2, 0)])
def test_gptq_by_hand(dialect, offset):
    qweight = torch.tensor([[words(range(n, n + 8)) for n in range(8)]], dtype=torch.int32)
    zeros = [5, 0, 1, 2, 3, 4, 15, 8]
    qzeros = torch.tensor([[words([(zero - offset) % 16 for zero in zeros])]], dtype=torch.int32)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": torch.full((1, 8), 2.0).half()}
    values = decode(read(dialect, parts, (8, 8), NAME))
    assert values.tolist() == [[2.0 * (n + k - zeros[n]) for k in range(8)] for n in range(8)]


def test_gptq_act_order_chooses_the_scale_by_g_idx():
    qweight = torch.tensor([[words([9] * 8)] * 8], dtype=torch.int32)
    qzeros = torch.full((2, 1), words([7] * 8), dtype=torch.int32)
    order = torch.tensor([1, 0, 0, 1, 1, 0, 1, 0], dtype=torch.int32)
    parts = {
        "qweight": qweight,
        "qzeros": qzeros,
        "scales": torch.tensor([[1.0] * 8, [3.0] * 8]).half(),
        "g_idx": order,
    }
    matrix = read(Dialect.GPTQ, parts, (8, 8), NAME)
    assert decode(matrix)[2].tolist() == [3.0, 1.0, 1.0, 3.0, 3.0, 1.0, 3.0, 1.0]
    assert torch.equal(write(matrix, Dialect.GPTQ)["g_idx"], order)
    in_order = read(Dialect.GPTQ, {**parts, "g_idx": torch.arange(8).int() // 4}, (8, 8), NAME)
    assert in_order.order is None
    with pytest.raises(FormatError, match="groups 0 to 2, expected 0 to 1"):
        read(Dialect.GPTQ, {**parts, "g_idx": order * 2}, (8, 8), NAME)


def test_awq_nibble_order_by_hand():
    """Nibble p of a word holds output row [0, 2, 4, 6, 1, 3, 5, 7][p]."""
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    rows = [3, 14, 1, 5, 9, 2, 6, 11]
    qweight = torch.tensor([[words([rows[row] for row in order])]] * 8, dtype=torch.int32)
    qzeros = torch.tensor([[words(order)]], dtype=torch.int32)
    parts = {"qweight": qweight, "qzeros": qzeros, "scales": torch.ones(1, 8).half()}
    values = decode(read(Dialect.AWQ, parts, (8, 8), NAME))
    assert values[:, 0].tolist() == [float(code - row) for row, code in enumerate(rows)]


BAD_VALUES = {"NaN": torch.nan, "infinite": torch.inf, "negative": -1.0, "zero": 0.0}
FLOAT_SCALES = [
    (Dialect.MODELOPT_NVFP4, NVFP4, "weight_scale_2"),
    (Dialect.CT_NVFP4, NVFP4, "weight_global_scale"),
    (Dialect.FP8_BLOCK, FP8_BLOCK, "weight_scale_inv"),
    (Dialect.MODELOPT_FP8, FP8_TENSOR, "weight_scale"),
    (Dialect.CT_FP8, FP8_CHANNEL, "weight_scale"),
    (Dialect.CT_INT4, int4(32), "weight_scale"),
    (Dialect.GPTQ, int4(32), "scales"),
    (Dialect.AWQ, int4(32), "scales"),
]


@pytest.mark.parametrize("kind", BAD_VALUES)
@pytest.mark.parametrize(("dialect", "format", "part"), FLOAT_SCALES, ids=lambda value: getattr(value, "name", None))
def test_a_bad_float_scale_is_refused_with_tensor_and_experts(dialect, format, part, kind):
    matrix = matrix_for(dialect, format, 4)
    parts = write(matrix, dialect)
    parts[part] = parts[part].clone()
    parts[part][1].view(-1)[0] = BAD_VALUES[kind]
    parts[part][3].view(-1)[-1] = BAD_VALUES[kind]
    with pytest.raises(FormatError) as caught:
        read(dialect, parts, matrix.shape, NAME)
    text = str(caught.value)
    assert f"{NAME}.{part}: found 2 {kind} of" in text
    assert "in experts 1, 3" in text


@pytest.mark.parametrize("code", [0x7F, 0xFF, 0x80, 0xB0, 0x00])
def test_a_bad_e4m3_block_scale_is_refused_with_its_place(code):
    matrix = matrix_for(Dialect.MODELOPT_NVFP4, NVFP4)
    parts = write(matrix, Dialect.MODELOPT_NVFP4)
    parts["weight_scale"] = parts["weight_scale"].clone()
    parts["weight_scale"].view(torch.uint8)[7, 2] = code
    kind = {0x7F: "NaN", 0xFF: "NaN", 0xB0: "negative"}.get(code, "zero")
    with pytest.raises(FormatError, match=rf"weight_scale: found 1 {kind} .* the first at \[7, 2\]"):
        read(Dialect.MODELOPT_NVFP4, parts, matrix.shape, NAME)


@pytest.mark.parametrize("dialect", [Dialect.CT_MXFP4, Dialect.GPT_OSS_MXFP4])
def test_the_reserved_e8m0_code_is_refused(dialect):
    matrix = matrix_for(dialect, MXFP4, 3)
    parts = write(matrix, dialect)
    name = dialect.parts[1].name
    parts[name] = parts[name].clone()
    parts[name][2, 5, 5] = 255
    with pytest.raises(FormatError, match=r"1 NaN .* in experts 2"):
        read(dialect, parts, matrix.shape, NAME)


@pytest.mark.parametrize(("dialect", "format"), [(Dialect.MODELOPT_NVFP4, NVFP4), (Dialect.FP8_BLOCK, FP8_BLOCK)])
def test_a_zero_scale_over_a_block_of_nought_is_fine(dialect, format):
    weight = weights(256, 256)
    weight[:128, 128:] = 0
    parts = write(encode(weight, format), dialect)
    name = dialect.parts[1].name
    scale = parts[name].float()
    scale[: scale.shape[0] // 2, scale.shape[1] // 2 :] = 0
    parts[name] = scale.to(parts[name].dtype)
    assert decode(read(dialect, parts, (256, 256), NAME))[:128, 128:].abs().max() == 0


def test_an_activation_scale_of_zero_does_not_stop_a_weight_only_load():
    matrix = matrix_for(Dialect.MODELOPT_NVFP4, NVFP4)
    parts = write(matrix, Dialect.MODELOPT_NVFP4) | {"input_scale": torch.tensor(0.0)}
    assert read(Dialect.MODELOPT_NVFP4, parts, matrix.shape, NAME).input_scale.value.tolist() == [0.0]


def test_missing_unknown_and_wrong_parts_are_named_together():
    parts = {
        "weight": torch.zeros(4, 8),
        "weight_scale": torch.zeros(4, 1).to(torch.float8_e4m3fn),
        "k_scale": torch.ones(()),
    }
    with pytest.raises(FormatError) as caught:
        read(Dialect.MODELOPT_NVFP4, parts, (4, 16), NAME)
    text = str(caught.value)
    assert f"{NAME}.weight_scale_2: found nothing" in text
    assert f"{NAME}.weight: found F32, expected U8" in text
    assert f"{NAME}.k_scale: found a tensor, expected none" in text


def test_wrong_shapes_are_named_together():
    parts = write(matrix_for(Dialect.MODELOPT_NVFP4, NVFP4), Dialect.MODELOPT_NVFP4)
    with pytest.raises(FormatError) as caught:
        read(Dialect.MODELOPT_NVFP4, parts, (576, 400), NAME)
    text = str(caught.value)
    assert "weight: found shape [576, 192], expected [576, 200] for a [576, 400] nvfp4 matrix" in text
    assert "weight_scale: found shape [576, 24], expected [576, 25]" in text


def test_what_a_dialect_cannot_hold_is_refused():
    gate, up = encode(weights(32, 64), NVFP4), encode(weights(32, 64, seed=1), NVFP4)
    with pytest.raises(FormatError, match="each piece as a matrix of its own"):
        write(concat_rows([gate, up]), Dialect.MODELOPT_NVFP4)
    with pytest.raises(FormatError, match="expected mxfp4"):
        write(gate, Dialect.CT_MXFP4)
    ordered = encode(weights(32, 64), int4(32))
    ordered = QuantMatrix(
        ordered.format, ordered.shape, ordered.codes, ordered.scale, zero=ordered.zero, order=torch.zeros(64).int()
    )
    with pytest.raises(FormatError, match="AWQ has no g_idx"):
        write(ordered, Dialect.AWQ)


def test_an_activation_scale_changes_meaning_with_the_dialect():
    matrix = matrix_for(Dialect.MODELOPT_NVFP4, NVFP4)
    with_input = QuantMatrix(
        matrix.format, matrix.shape, matrix.codes, matrix.scale, matrix.global_scale,
        input_scale=Scale(torch.tensor([0.25]), Element.F32),
    )  # fmt: skip
    assert write(with_input, Dialect.CT_NVFP4)["input_global_scale"].tolist() == [4.0]
