"""`torch`: any stored format and any number of tokens, decoded to float32 piece by piece for torch's own product."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from muster.formats.codec import decode
from muster.formats.matrix import QuantMatrix
from muster.formats.spec import FORMATS
from muster.gemm.backend import LinearBackend, LinearFacts
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import register_linear
from muster.workspace import Workspace

_PIECE = 1 << 22
"""Weights decoded at a time: their float32 copy stays within what a product reads back from cache."""


@dataclass(frozen=True, eq=False)
class TorchPrepared:
    """The matrix as it is stored."""

    matrix: QuantMatrix
    bias_N: Tensor | None
    nbytes: int = 0


@register_linear("torch")
class TorchLinear(LinearBackend[TorchPrepared]):
    """Decodes, then `torch.mm`; for prompts, where one decode serves many tokens."""

    facts = LinearFacts(
        devices=frozenset({"cpu"}),
        weights=frozenset(format.family for format in FORMATS.values()),
        dtypes=frozenset({"f32"}),
        act_order=True,
        bias=True,
        deterministic=True,
        kernels=("mm",),
    )

    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> TorchPrepared:
        return TorchPrepared(matrix, bias_N)

    def run(self, prepared: TorchPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
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
