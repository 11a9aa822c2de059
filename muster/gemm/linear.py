"""A dense linear: one stored matrix and, for every number of tokens, the backend that computes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from muster.contract import Decline
from muster.device import Device
from muster.errors import UsageError
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import AnyLinear, Prepared
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.workspace import Workspace

_DTYPES: dict[Literal["bf16", "f16", "f32"], torch.dtype] = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
}


@dataclass(frozen=True, eq=False)
class _Choice:
    """A backend with its weights; it serves up to `max_tokens` tokens (None: any number)."""

    name: str
    backend: AnyLinear
    prepared: Prepared
    max_tokens: int | None


class Linear:
    """`y_TN = x_TK @ w_NK.T + bias_N`, computed by the first backend that is meant for T tokens."""

    def __init__(self, problem: LinearProblem, matrix: QuantMatrix, choices: tuple[_Choice, ...]) -> None:
        self.problem = problem
        self.matrix = matrix
        self._choices = choices
        self._dtype = _DTYPES[problem.dtype]
        self._workspace = Workspace(matrix.codes.device)

    @staticmethod
    def build(matrix: QuantMatrix, bias: Tensor | None, device: Device, requested: str | None = None) -> Linear:
        """The linear of a stored matrix `[N, K]` and a bias `[N]`, with float32 activations on a CPU, else bf16.

        `requested` names the only backend to use; None picks by token count among those that can.

        Raises:
            UsageError: the requested backend, or every backend, declines; with all reasons.
        """
        rows, columns = matrix.shape
        dtype: Literal["f32", "bf16"] = "f32" if device.key == "cpu" else "bf16"
        act_order = matrix.order is not None
        problem = LinearProblem(rows, columns, matrix.format, dtype, bias is not None, act_order)
        bias_N = None if bias is None else bias.float().contiguous()
        choices = tuple(
            _Choice(name, backend, backend.prepare(problem, matrix, bias_N), limit)
            for name, backend, limit in _resolve(problem, device, requested)
        )
        return Linear(problem, matrix, choices)

    @property
    def nbytes(self) -> int:
        """Bytes of the matrix and of every layout kept beside it."""
        return self.matrix.nbytes + sum(choice.prepared.nbytes for choice in self._choices)

    @property
    def backend_names(self) -> tuple[str, ...]:
        """Names of the backends it uses, those for few tokens first."""
        return tuple(choice.name for choice in self._choices)

    def __call__(self, x_TK: Tensor) -> Tensor:
        """`y_TN`, newly allocated, in the dtype of `x_TK`."""
        tokens = x_TK.shape[0]
        out_TN = torch.empty(tokens, self.problem.rows, dtype=self._dtype, device=x_TK.device)
        for choice in self._choices:
            if choice.max_tokens is None or tokens <= choice.max_tokens:
                choice.backend.run(choice.prepared, x_TK.contiguous(), out_TN, self._workspace)
                break
        return out_TN


def _resolve(
    problem: LinearProblem, device: Device, requested: str | None
) -> tuple[tuple[str, AnyLinear, int | None], ...]:
    if requested is not None:
        backend = linears().get(requested)
        decline = backend.supports(problem, device)
        if decline is not None:
            raise _refusal(problem, {requested: decline})
        return ((requested, backend, None),)

    chosen: list[tuple[str, AnyLinear, int | None]] = []
    declines: dict[str, Decline] = {}
    for name, backend in linears():
        decline = backend.supports(problem, device)
        if decline is not None:
            declines[name] = decline
        elif not chosen or chosen[-1][2] is not None:
            chosen.append((name, backend, backend.facts.max_tokens))
    if not chosen or chosen[-1][2] is not None:
        raise _refusal(problem, declines)
    return tuple(chosen)


def _refusal(problem: LinearProblem, declines: dict[str, Decline]) -> UsageError:
    return UsageError(
        f"linear {problem.rows} x {problem.columns} in {problem.weights.name}",
        expected="a backend that can compute it for any number of tokens",
        reasons=[UsageError(f"{name} declines", found=reason) for name, d in declines.items() for reason in d.reasons],
    )
