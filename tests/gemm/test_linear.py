"""Every linear backend over the same shapes, formats and token counts, against float64."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from muster.device import cpu
from muster.errors import UsageError
from muster.formats.codec import decode, encode
from muster.formats.matrix import QuantMatrix, concat_rows
from muster.formats.spec import BF16, F32, FORMATS, NVFP4, Format, int4
from muster.gemm.linear import Linear, linear_problem
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.plan import by_facts
from muster.workspace import Workspace

BACKENDS = tuple(linears().names())
SHAPES = ((1, 64), (7, 192), (40, 576), (130, 384))
TOKENS = (0, 1, 2, 3, 7, 16, 129)
LIMIT, WORST = 1.2e-6, 4.5e-6
"""Relative RMS of everything and of the worst token, three times what correct float32 sums show."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(format: Format, rows: int, columns: int) -> QuantMatrix:
    return encode(draw(rows, columns), format)


def run(backend: str, matrix: QuantMatrix, bias: Tensor | None, x_TK: Tensor) -> Tensor:
    """One run into poisoned memory with guard bands, its workspace poisoned too."""
    rows, columns = matrix.shape
    problem = LinearProblem(rows, columns, matrix.format, "f32", bias is not None, matrix.order is not None)
    entry = linears().get(backend)
    answer = entry.supports(problem, cpu())
    if answer is not None:
        pytest.skip(str(answer))
    prepared = entry.prepare(problem, matrix, bias)
    guarded = torch.full((1024 + len(x_TK) * rows + 1024,), math.nan)
    out_TN = guarded[1024:-1024].view(len(x_TK), rows)
    workspace, before = Workspace(), x_TK.clone()
    entry.run(prepared, x_TK, out_TN, workspace)
    for buffer in workspace._buffers.values():
        buffer.fill_(math.nan)
    first = out_TN.clone()
    out_TN.fill_(math.nan)
    entry.run(prepared, x_TK, out_TN, workspace)
    assert guarded[:1024].isnan().all()
    assert guarded[-1024:].isnan().all()
    assert torch.equal(x_TK, before)
    assert torch.equal(out_TN, first) == entry.facts.deterministic
    return out_TN


def judge(found_TN: Tensor, matrix: QuantMatrix, bias: Tensor | None, x_TK: Tensor) -> None:
    truth_TN = x_TK.double() @ decode(matrix, torch.float64).T
    truth_TN = truth_TN if bias is None else truth_TN + bias.double()
    if not truth_TN.numel():
        assert found_TN.shape == truth_TN.shape
        return
    scale = truth_TN.square().mean().sqrt()
    error_TN = found_TN - truth_TN
    assert error_TN.square().mean().sqrt() <= LIMIT * scale
    assert error_TN.square().mean(-1).sqrt().max() <= WORST * scale


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [*FORMATS.values(), int4(64)], ids=lambda format: format.name)
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_every_format_and_shape(backend: str, format: Format, rows: int, columns: int) -> None:
    if format.family == "int4" and format.block is not None and columns % format.block[1]:
        pytest.skip("int4 groups do not divide the columns")
    stored, x_TK = matrix(format, rows, columns), draw(9, columns, seed=1)
    bias = draw(rows, seed=2) if rows % 2 else None
    judge(run(backend, stored, bias, x_TK), stored, bias, x_TK)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("format", [BF16, NVFP4], ids=lambda format: format.name)
@pytest.mark.parametrize("tokens", TOKENS)
def test_every_token_count(backend: str, format: Format, tokens: int) -> None:
    stored, x_TK = matrix(format, 40, 192), draw(tokens, 192, seed=1)
    judge(run(backend, stored, None, x_TK), stored, None, x_TK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_pieces_keep_their_own_tensor_scales(backend: str) -> None:
    pieces = [encode(draw(rows, 128, seed=rows) * factor, NVFP4) for rows, factor in ((32, 1.0), (16, 30.0), (16, 0.1))]
    stored, x_TK = concat_rows(pieces), draw(3, 128, seed=1)
    found_TN = run(backend, stored, None, x_TK)
    for part, piece in zip(found_TN.split([32, 16, 16], -1), pieces, strict=True):
        judge(part, piece, None, x_TK)


@pytest.mark.parametrize("backend", BACKENDS)
def test_act_order_is_computed_or_declined(backend: str) -> None:
    order = torch.arange(128, dtype=torch.int32).flip(0) // 32
    stored, x_TK = replace(matrix(int4(32), 24, 128), order=order), draw(3, 128, seed=1)
    judge(run(backend, stored, None, x_TK), stored, None, x_TK)


@pytest.mark.parametrize("backend", [name for name in BACKENDS if linears().get(name).facts.batch_invariant])
@pytest.mark.parametrize("format", [BF16, F32, NVFP4], ids=lambda format: format.name)
def test_a_token_gets_the_bits_it_gets_alone_on_any_number_of_threads(backend: str, format: Format) -> None:
    stored, x_TK = matrix(format, 40, 192), draw(11, 192, seed=1)
    together = run(backend, stored, None, x_TK)
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        alone = torch.cat([run(backend, stored, None, x_TK[t : t + 1]) for t in range(11)])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, alone)


def built(stored: QuantMatrix, bias: torch.Tensor | None = None, requested: str | None = None) -> Linear:
    problem = linear_problem(stored, bias, cpu())
    return Linear(problem, stored, bias, by_facts(linears(), problem, cpu(), requested, kind="linear"))


@pytest.mark.parametrize("tokens", [1, 128, 129])
def test_a_linear_chooses_by_token_count(tokens: int) -> None:
    stored, bias = matrix(BF16, 40, 192), draw(40, seed=2)
    linear, x_TK = built(stored, bias), draw(tokens, 192, seed=1)
    assert linear.backend_names == ("cpu", "torch")
    assert linear.nbytes == stored.nbytes
    judge(linear(x_TK), stored, bias, x_TK)


def test_a_column_count_the_kernel_cannot_take_goes_to_torch() -> None:
    stored, x_TK = matrix(BF16, 40, 100), draw(2, 100, seed=1)
    linear = built(stored)
    assert linear.backend_names == ("torch",)
    judge(linear(x_TK), stored, None, x_TK)


def test_rows_that_do_not_lie_one_after_the_other_are_computed_all_the_same() -> None:
    stored, x_KT = matrix(NVFP4, 40, 192), draw(192, 3, seed=1)
    judge(built(stored)(x_KT.T), stored, None, x_KT.T)


def test_a_requested_backend_that_declines_is_an_error_with_every_reason() -> None:
    stored = matrix(Format("f16", FORMATS["f16"].element), 40, 100)
    with pytest.raises(UsageError) as caught:
        built(stored, requested="cpu")
    assert "reads" in str(caught.value)
    assert "columns % 64" in str(caught.value)


def test_a_requested_backend_is_the_only_one() -> None:
    assert built(matrix(BF16, 8, 64), requested="torch").backend_names == ("torch",)


def test_an_unknown_backend_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(UsageError, match="cpu, triton, torch"):
        built(matrix(BF16, 8, 64), requested="cutlass")


def test_a_nan_reaches_its_own_token_only() -> None:
    linear, x_TK = built(matrix(NVFP4, 40, 192)), draw(5, 192, seed=1)
    x_TK[2, 7] = math.nan
    y_TN = linear(x_TK)
    assert y_TN[2].isnan().all()
    assert y_TN[[0, 1, 3, 4]].isfinite().all()
