"""Triton's linear against float64, every family it declares. Without a GPU see test_triton_interpreter."""

import math
import os
from dataclasses import replace

import pytest
import torch

from muster.errors import FormatError
from muster.formats.codec import decode, encode
from muster.formats.matrix import Meaning, QuantMatrix, concat_rows
from muster.formats.spec import FORMATS, FP8_BLOCK, MXFP4, NVFP4, Format
from muster.workspace import Workspace

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="see tests/test_triton_interpreter.py"
)
FAMILIES = ("bf16", "nvfp4", "mxfp4", "fp8-block", "fp8-channel", "fp8-tensor")
LIMIT = 3e-6
"""Relative RMS of a float32 output: sums in float32, everything else exact."""


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def stored(format: Format, rows: int, columns: int, pieces: int = 1, meaning: Meaning = Meaning.MULTIPLIES):
    weights = drawn(rows, columns) * drawn(rows, 1, seed=5).exp()
    return on_device(encode(weights, format, pieces, meaning))


def on_device(matrix: QuantMatrix) -> QuantMatrix:
    return matrix.with_tensors({name: one.to(DEVICE) for name, one in matrix.tensors.items()}, matrix.shape)


def run(matrix: QuantMatrix, x_TK: torch.Tensor, bias_N: torch.Tensor | None = None) -> torch.Tensor:
    """Twice into poisoned memory between guards, the workspace poisoned in between; float32 shows what bf16 hides."""
    from muster.gemm.kernels.triton_layout import TritonLinearWeights
    from muster.gemm.kernels.triton_linear import linear

    weights = TritonLinearWeights.of(matrix, None if bias_N is None else bias_N.to(DEVICE))
    rows, workspace, outs = matrix.shape[0], Workspace(DEVICE), []
    for _ in range(2):
        guarded = torch.full((512 + len(x_TK) * rows + 512,), math.nan, device=DEVICE)
        linear(weights, x_TK.to(DEVICE), guarded[512:-512].view(len(x_TK), rows), workspace)
        for buffer in workspace.buffers:
            buffer.fill_(math.nan)
        assert guarded[:512].isnan().all()
        assert guarded[-512:].isnan().all()
        assert not weights.turns.any()
        outs.append(guarded[512:-512].view(len(x_TK), rows))
    assert torch.equal(*outs)
    return outs[0].cpu()


def error(found: torch.Tensor, matrix: QuantMatrix, x_TK: torch.Tensor, bias_N: torch.Tensor | None = None) -> float:
    truth = x_TK.double() @ decode(matrix, torch.float64).cpu().T
    truth = truth if bias_N is None else truth + bias_N.double()
    return float((found.double() - truth).square().mean().sqrt() / truth.square().mean().sqrt())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "columns", "tokens"), [(40, 576, 3), (130, 384, 17), (7, 192, 1)])
def test_every_family_and_shape(family, rows, columns, tokens) -> None:
    matrix, x_TK = stored(FORMATS[family], rows, columns), drawn(tokens, columns, seed=1).bfloat16()
    bias_N = drawn(rows, seed=2) if rows % 2 else None
    assert error(run(matrix, x_TK, bias_N), matrix, x_TK, bias_N) <= LIMIT


@pytest.mark.parametrize("family", FAMILIES)
def test_programs_that_share_the_columns_add_up(family, monkeypatch) -> None:
    monkeypatch.setattr("muster.gemm.kernels.triton_linear._processors", lambda _: 132)
    matrix, x_TK = stored(FORMATS[family], 70, 1024), drawn(5, 1024, seed=1).bfloat16()
    assert error(run(matrix, x_TK), matrix, x_TK) <= LIMIT


@pytest.mark.parametrize("tokens", [0, 1, 16, 33, 64, 65, 130])
def test_every_tile_of_tokens(tokens) -> None:
    matrix, x_TK = stored(NVFP4, 66, 64), drawn(tokens, 64, seed=1).bfloat16()
    found = run(matrix, x_TK)
    assert found.shape == (tokens, 66)
    assert not tokens or error(found, matrix, x_TK) <= LIMIT


@pytest.mark.parametrize("meaning", Meaning)
def test_row_pieces_keep_their_own_tensor_scales(meaning) -> None:
    pieces = [stored(NVFP4, rows, 128, meaning=meaning) for rows in (32, 16)]
    loud = replace(pieces[1], global_scale=replace(pieces[1].global_scale, value=pieces[1].global_scale.value * 30))
    matrix, x_TK = concat_rows([pieces[0], loud]), drawn(3, 128, seed=1).bfloat16()
    assert error(run(matrix, x_TK), matrix, x_TK) <= LIMIT


def test_block_scales_from_one_end_of_e8m0_to_the_other_do_not_overflow() -> None:
    matrix = stored(MXFP4, 16, 128)
    codes = torch.full_like(matrix.scale.value, 127)
    codes[0], codes[1], codes[2] = 245, 1, 20
    matrix = replace(matrix, scale=replace(matrix.scale, value=codes))
    x_TK = drawn(2, 128, seed=1).bfloat16()
    found, truth = run(matrix, x_TK), x_TK.double() @ decode(matrix, torch.float64).cpu().T
    assert found.isfinite().all()
    assert (found[:, 3:].double() - truth[:, 3:]).abs().max() <= 1e-5 * truth[:, 3:].abs().max()
    assert (found[:, 0].double() / truth[:, 0] - 1).abs().max() <= 1e-4


def test_all_e2m1_and_e4m3_codes_under_all_e4m3_scales_are_exact() -> None:
    codes = torch.arange(256, dtype=torch.uint8)[(torch.arange(256) & 0x7F) != 0x7F]
    numbers = QuantMatrix(
        FP8_BLOCK,
        (254, 16),
        codes[:, None].expand(254, 16).contiguous().view(torch.float8_e4m3fn),
        scale=encode(torch.ones(254, 16), FP8_BLOCK).scale,
    )
    pairs = stored(NVFP4, 126, 32)
    pairs = replace(
        pairs,
        codes=(torch.arange(16, dtype=torch.uint8) * 17).expand(126, 16).contiguous().to(DEVICE),
        scale=replace(
            pairs.scale,
            value=torch.arange(1, 127, dtype=torch.uint8)[:, None].repeat(1, 2).view(torch.float8_e4m3fn).to(DEVICE),
        ),
    )
    for matrix, columns in ((on_device(numbers), 16), (pairs, 32)):
        single = torch.eye(columns).bfloat16()
        assert torch.equal(run(matrix, single), decode(matrix).cpu().T)


def test_codes_that_are_no_numbers_are_refused() -> None:
    matrix = stored(FORMATS["fp8-tensor"], 8, 64)
    matrix.codes.view(torch.uint8)[3, 5] = 0xFF
    with pytest.raises(FormatError, match="1 NaN"):
        run(matrix, drawn(1, 64).bfloat16())


def test_a_nan_reaches_its_own_token_only() -> None:
    matrix, x_TK = stored(NVFP4, 40, 192), drawn(5, 192, seed=1).bfloat16()
    x_TK[2, 7] = math.nan
    found = run_once(matrix, x_TK)
    assert found[2].isnan().all()
    assert found[[0, 1, 3, 4]].isfinite().all()


def run_once(matrix: QuantMatrix, x_TK: torch.Tensor) -> torch.Tensor:
    from muster.gemm.kernels.triton_layout import TritonLinearWeights
    from muster.gemm.kernels.triton_linear import linear

    out_TN = torch.zeros(len(x_TK), matrix.shape[0], device=DEVICE)
    linear(TritonLinearWeights.of(matrix, None), x_TK.to(DEVICE), out_TN, Workspace(DEVICE))
    return out_TN.cpu()
