"""A dense linear in float64: the oracle that judges every backend."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.formats.matrix import QuantMatrix
from muster.formats.rounding import EXACT, Rounding, activation_scale, round_to, round_weights

_PIECE = 1 << 24
"""Weights decoded at a time where rows stand alone: a whole vocabulary in float64 would be gigabytes."""


def linear(matrix: QuantMatrix, bias_N: Tensor | None, x_TK: Tensor, rounding: Rounding = EXACT) -> Tensor:
    """`x_TK @ w_NK.T + bias_N` as float64 `[T, N]`; of a rounding only `weights` and `input` apply."""
    x_TK = round_to(x_TK.double(), rounding.input, activation_scale(matrix))
    pieces = [x_TK @ round_weights(piece, rounding.weights).T for piece in _pieces(matrix)]
    y_TN = torch.cat(pieces, -1)
    return y_TN if bias_N is None else y_TN + bias_N.double()


def _pieces(matrix: QuantMatrix) -> list[QuantMatrix]:
    if matrix.format.quantised:
        return [matrix]
    step = max(_PIECE // matrix.shape[-1], 1)
    return [QuantMatrix.plain(codes) for codes in torch.split(matrix.codes, step)]
