"""`torch`: any stored format and any number of tokens, decoded for torch's own product."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from muster.device import COMPUTE_CAPABILITIES
from muster.formats.codec import decode, decode_scale
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import FORMATS, FP8_CHANNEL, Element
from muster.gemm.backend import LinearBackend, LinearFacts
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import register_linear
from muster.workspace import Workspace

_PIECE = 1 << 22
"""Weights decoded at a time on a CPU: their float32 copy stays within what a product reads back from cache."""
_EXACT_IN_BF16 = frozenset({"nvfp4", "mxfp4", "fp8-channel", "fp8-tensor"})
"""Families whose values are bf16 numbers once the scales of whole rows are left out: codes of at most four significant
bits, times a block scale of at most four."""


@dataclass(frozen=True, eq=False)
class TorchPrepared:
    """The matrix as it is stored.

    Attributes:
        matrix: the matrix.
        bias_N: float32 or None.
        unscaled: the matrix without the scales of its rows, where its values are then exact in bf16; else None.
        scale_N: those scales, float32; None: there are none.
        nbytes: bytes made beyond the matrix.
    """

    matrix: QuantMatrix
    bias_N: Tensor | None
    unscaled: QuantMatrix | None = None
    scale_N: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the rows' scales."""
        return 0 if self.scale_N is None else self.scale_N.nbytes


@register_linear("torch")
class TorchLinear(LinearBackend[TorchPrepared]):
    """Decodes, then `torch.mm`; for prompts, where one decode serves many tokens.

    On a GPU the product is one of bf16 matrices with a float32 result where that rounds nothing, else of float32.
    """

    facts = LinearFacts(
        devices=frozenset({"cpu", *COMPUTE_CAPABILITIES}),
        weights=frozenset(format.family for format in FORMATS.values()),
        dtypes=frozenset({"f32", "bf16"}),
        act_order=True,
        bias=True,
        deterministic=True,
        kernels=("mm",),
    )

    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> TorchPrepared:
        if problem.dtype != "bf16" or matrix.format.family not in _EXACT_IN_BF16 or not matrix.codes.is_cuda:
            return TorchPrepared(matrix, bias_N)
        return TorchPrepared(matrix, bias_N, *_apart(matrix))

    def run(self, prepared: TorchPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
        if x_TK.dtype is torch.float32:
            _in_float32(prepared, x_TK, out_TN, workspace)
        elif prepared.matrix.codes.dtype is torch.bfloat16 and prepared.bias_N is None:
            torch.mm(x_TK, prepared.matrix.codes.T, out=out_TN)
        else:
            out_TN.copy_(_product(prepared, x_TK))


def _in_float32(prepared: TorchPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
    matrix = prepared.matrix
    rows, columns = matrix.shape
    if matrix.format.quantised:
        torch.mm(x_TK, decode(matrix).T, out=out_TN)
    else:
        step = max(_PIECE // columns, 1)
        for start in range(0, rows, step):
            codes = matrix.codes[start : start + step]
            weight_NK = workspace.take("weight", tuple(codes.shape), torch.float32).copy_(codes)
            torch.mm(x_TK, weight_NK.T, out=out_TN[:, start : start + step])
    if prepared.bias_N is not None:
        out_TN += prepared.bias_N


def _product(prepared: TorchPrepared, x_TK: Tensor) -> Tensor:
    """`x_TK @ w.T + bias` of bf16 tokens in float32."""
    matrix = prepared.matrix
    if matrix.codes.dtype is torch.bfloat16 and x_TK.is_cuda:
        y_TN = torch.mm(x_TK, matrix.codes.T, out_dtype=torch.float32)
    elif prepared.unscaled is not None:
        y_TN = torch.mm(x_TK, decode(prepared.unscaled, torch.bfloat16).T, out_dtype=torch.float32)
    else:
        y_TN = torch.mm(x_TK.float(), decode(matrix).T)
    if prepared.scale_N is not None:
        y_TN *= prepared.scale_N
    return y_TN if prepared.bias_N is None else y_TN.add_(prepared.bias_N)


def _apart(matrix: QuantMatrix) -> tuple[QuantMatrix, Tensor | None]:
    """The matrix without the scales of whole rows, and those scales."""
    if matrix.global_scale is not None:
        return replace(matrix, global_scale=None), row_scales(matrix.global_scale, matrix.shape[0])
    if matrix.format.family in ("fp8-channel", "fp8-tensor"):
        assert matrix.scale is not None
        scale_N = row_scales(matrix.scale, matrix.shape[0])
        ones = Scale(torch.ones_like(scale_N).unsqueeze(-1), Element.F32)
        return replace(matrix, format=FP8_CHANNEL, scale=ones), scale_N
    return matrix, None


def row_scales(scale: Scale, rows: int) -> Tensor:
    """What a scale of equal row pieces (one, several, or each row) multiplies every row by, float32 `[N]`."""
    values = decode_scale(scale).flatten()
    values = values if scale.meaning is Meaning.MULTIPLIES else 1 / values
    return values.repeat_interleave(rows // len(values))
