"""A dense linear: one stored matrix and, for every number of tokens, the backend that computes it."""

from __future__ import annotations

import torch
from torch import Tensor

from muster.device import DTYPES, Device
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import Prepared
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.plan import Choice
from muster.workspace import Workspace


def linear_problem(matrix: QuantMatrix, bias: Tensor | None, device: Device) -> LinearProblem:
    """What the linear of a stored matrix `[N, K]` must compute: float32 activations on a CPU, else bf16."""
    rows, columns = matrix.shape
    return LinearProblem(rows, columns, matrix.format, device.activations, bias is not None, matrix.order is not None)


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
        self._choice = choice
        self._backends = {name: linears().get(name) for name in choice.backends}
        bias_N = None if bias is None else bias.float().contiguous()
        self._prepared: dict[str, Prepared] = {
            name: backend.prepare(problem, matrix, bias_N) for name, backend in self._backends.items()
        }
        self._workspace = Workspace(matrix.codes.device)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of every layout kept beside it."""
        return self.matrix.nbytes + sum(prepared.nbytes for prepared in self._prepared.values())

    def __call__(self, x_TK: Tensor) -> Tensor:
        """`y_TN`, newly allocated, in the problem's dtype, to which `x_TK` is rounded where it is not of it."""
        tokens, dtype = len(x_TK), DTYPES[self.problem.dtype]
        out_TN = torch.empty(tokens, self.problem.rows, dtype=dtype, device=x_TK.device)
        name = self._choice.backend_for(tokens)
        self._backends[name].run(self._prepared[name], x_TK.to(dtype).contiguous(), out_TN, self._workspace)
        return out_TN
