"""The contract of a dense linear's backend: the expert layer's rules for one matrix.

Facts are declared, a decline carries every reason, the layout is bound to its kernel, the output is the caller's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from muster.contract import Decline, Package, in_order, missing_packages
from muster.device import Device
from muster.formats.matrix import QuantMatrix
from muster.formats.rounding import EXACT, Rounding
from muster.gemm.problem import LinearProblem
from muster.workspace import Workspace


@dataclass(frozen=True)
class LinearFacts:
    """What a backend says of itself.

    Attributes:
        devices: "cpu" or exact compute capabilities as "9.0"; never a lower bound.
        weights: format families (`Format.family`) of the matrix.
        act_order: reads int4 columns whose scale groups are in any order.
        dtypes: activation dtypes in and out.
        bias: takes a bias.
        deterministic: the same inputs give the same bits.
        batch_invariant: the answer for a token does not depend on the other tokens of the call.
        columns_multiple, rows_multiple: alignment of K and N.
        max_tokens: the largest T it is meant for; None: any.
        packages: what must be installed.
        kernels: names of the kernels it launches.
        rounding: where it rounds besides its sums and its output; the judge follows it.
    """

    devices: frozenset[str]
    weights: frozenset[str]
    dtypes: frozenset[str]
    act_order: bool = False
    bias: bool = False
    deterministic: bool = False
    batch_invariant: bool = False
    columns_multiple: int = 1
    rows_multiple: int = 1
    max_tokens: int | None = None
    packages: tuple[Package, ...] = ()
    kernels: tuple[str, ...] = ()
    rounding: Rounding = EXACT

    def decline(self, problem: LinearProblem, device: Device) -> Decline | None:
        """Every declared fact that `problem` on `device` breaks; None when all hold."""
        checks = {
            f"runs on {in_order(self.devices)}, this is {device.key}": device.key not in self.devices,
            f"reads {', '.join(sorted(self.weights))} weights, these are {problem.weights.name}": (
                problem.weights.family not in self.weights
            ),
            "takes no act-order columns, the matrix has them": problem.act_order and not self.act_order,
            f"computes in {', '.join(sorted(self.dtypes))}, the model in {problem.dtype}": (
                problem.dtype not in self.dtypes
            ),
            "takes no bias, the matrix has one": problem.bias and not self.bias,
            f"needs columns % {self.columns_multiple} == 0, found {problem.columns}": (
                problem.columns % self.columns_multiple != 0
            ),
            f"needs rows % {self.rows_multiple} == 0, found {problem.rows}": problem.rows % self.rows_multiple != 0,
        }
        checks |= dict.fromkeys(missing_packages(self.packages) if device.present else (), True)
        return Decline.when(checks)


class Prepared(Protocol):
    """A matrix in the layout that one backend's kernel reads."""

    @property
    def nbytes(self) -> int:
        """Bytes this layout keeps beyond the matrix it was made from (0 when it only views it)."""
        ...


P = TypeVar("P", bound=Prepared)


class LinearBackend(ABC, Generic[P]):
    """One way to compute a dense linear."""

    facts: LinearFacts

    def supports(self, problem: LinearProblem, device: Device) -> Decline | None:
        """None, or every reason against; touches no accelerator and imports no library."""
        return self.facts.decline(problem, device)

    @abstractmethod
    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> P:
        """The layout this backend's kernel reads, made once at load; the bias is float32."""

    @abstractmethod
    def run(self, prepared: P, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
        """Writes all of `out_TN`, which does not alias `x_TK`; both are contiguous and of the problem's dtype."""


AnyLinear = LinearBackend[Any]
