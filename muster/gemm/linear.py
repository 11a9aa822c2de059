"""A dense linear: one stored matrix and, for every number of tokens, the backend that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muster.device import Device
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import AnyLinear, Prepared
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.plan import Choice
from muster.workspace import Workspace

_DTYPES: dict[Literal["bf16", "f16", "f32"], torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}


def linear_problem(matrix: QuantMatrix, bias: Tensor | None, device: Device) -> LinearProblem:
    """What the linear of a stored matrix `[N, K]` must compute: float32 activations on a CPU, else bf16."""
    rows, columns = matrix.shape
    dtype: Literal["f32", "bf16"] = "f32" if device.key == "cpu" else "bf16"
    return LinearProblem(rows, columns, matrix.format, dtype, bias is not None, matrix.order is not None)


@dataclass(frozen=True, eq=False)
class _Step:
    """A backend with its weights; it serves up to `max_tokens` tokens (None: any number)."""

    backend: AnyLinear
    prepared: Prepared
    max_tokens: int | None


class Linear:
    """`y_TN = x_TK @ w_NK.T + bias_N`, computed by the backend that was chosen for T tokens.

    Args:
        problem: what to compute.
        matrix: the stored weight `[N, K]`; each chosen backend prepares its own layout of it once, here.
        bias: `[N]` in any float dtype, or None.
        choice: which backend runs for which token count.
    """

    def __init__(self, problem: LinearProblem, matrix: QuantMatrix, bias: Tensor | None, choice: Choice) -> None:
        self.problem = problem
        self.matrix = matrix
        self.backend_names = choice.backends
        bias_N = None if bias is None else bias.float().contiguous()
        backends = {name: linears().get(name) for name in choice.backends}
        self._prepared: dict[str, Prepared] = {
            name: backend.prepare(problem, matrix, bias_N) for name, backend in backends.items()
        }
        self._steps = tuple(
            _Step(backends[entry.backend], self._prepared[entry.backend], entry.max_tokens) for entry in choice.entries
        )
        self._dtype = _DTYPES[problem.dtype]
        self._workspace = Workspace(matrix.codes.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of every layout kept beside it."""
        return self.matrix.nbytes + sum(prepared.nbytes for prepared in self._prepared.values())

    def __call__(self, x_TK: Tensor) -> Tensor:
        """`y_TN`, newly allocated, in the dtype of `x_TK`."""
        tokens = x_TK.shape[0]
        out_TN = torch.empty(tokens, self.problem.rows, dtype=self._dtype, device=x_TK.device)
        step = next(step for step in self._steps if step.max_tokens is None or tokens <= step.max_tokens)
        step.backend.run(step.prepared, x_TK.contiguous(), out_TN, self._workspace)
        return out_TN
