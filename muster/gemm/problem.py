"""What a dense linear must compute: shape, stored format, activation dtype. No tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from muster.formats.spec import Format


@dataclass(frozen=True)
class LinearProblem:
    """`y_TN = x_TK @ w_NK.T (+ bias_N)`.

    Attributes:
        rows: N, output features.
        columns: K, input features.
        weights: stored format of the matrix.
        dtype: activations in and out: "bf16", "f16" or "f32".
        bias: a bias is added.
        act_order: int4 columns belong to scale groups in any order (GPTQ).
    """

    rows: int
    columns: int
    weights: Format
    dtype: Literal["bf16", "f16", "f32"] = "f32"
    bias: bool = False
    act_order: bool = False
