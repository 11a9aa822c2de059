"""The backend contract: declared facts, declines with every reason, a layout bound to its kernel, a caller's output.

A runner core takes rows already grouped by expert and returns rows. A fused function takes tokens and their routing
and returns tokens. Both write into an output the caller gives, which never aliases an input, and allocate nothing
beyond their workspace once it is warm. All tensors they are given are contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from torch import Tensor

from muster.contract import Decline, Package, in_order, missing_packages
from muster.device import Device
from muster.formats.rounding import EXACT, Rounding
from muster.moe.problem import ActivationName, MoEProblem, Scoring
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace as Workspace


@dataclass(frozen=True, eq=False)
class Routed:
    """The router's answer.

    Attributes:
        ids_TK: int64, global expert ids; any id outside [0, E) is a sentinel: that slot is computed nowhere.
        weights_TK: float32, the scaling factor already applied.
    """

    ids_TK: Tensor
    weights_TK: Tensor


class RowLayout(Enum):
    """How rows are grouped by expert.

    SORTED: all rows of expert 0, then of expert 1, ... without gaps.
    PADDED: the same, each expert's first row at a multiple of a block; rows in between hold zeros.
    MASKED: every expert owns the same number of rows, of which the first `counts_L` are real.
    """

    SORTED = "sorted"
    PADDED = "padded"
    MASKED = "masked"


@dataclass(frozen=True, eq=False)
class ExpertRows:
    """Rows grouped by local expert.

    Attributes:
        x_RD: the rows; those that an expert owns and no token fills hold zeros. There may be more than the experts own.
        starts_L: int64, the first row of each expert.
        counts_L: int64, how many real rows each expert has.
        layout: how the rows lie.
    """

    x_RD: Tensor
    starts_L: Tensor
    counts_L: Tensor
    layout: RowLayout


@dataclass(frozen=True)
class Facts:
    """What a backend says of itself. The conformance suite checks each; none is trusted.

    Attributes:
        devices: "cpu" or exact compute capabilities as "9.0"; never a lower bound.
        weights: format families (`Format.family`) of the expert matrices.
        act_order: reads int4 columns whose scale groups are in any order.
        dtypes: activation dtypes in and out.
        activations: names from `Activation`.
        bias: takes biases.
        clamp: takes an activation limit.
        router_weight_on_input: can apply the routing weight to the expert's input (runner cores: always, the
            dispatcher does it).
        zero_tokens: T = 0 is fine.
        sentinel_ids: ids of experts elsewhere are skipped.
        graph_safe: no host synchronisation and no allocation in `run` once warm.
        deterministic: the same inputs give the same bits.
        hidden_multiple, inner_multiple: alignment of D and F.
        scorings: for one that routes by itself, from logits, what its router scores by; None: it takes ids and weights.
        renormalised: routes by itself, and always divides the K weights by their sum.
        max_tokens: the largest T it is meant for; None: any.
        layout: backends that name the same one read each other's prepared weights, and one copy serves them; empty: its
            own.
        packages: what must be importable.
        kernels: names of the kernels it launches.
        tiles: whose tile sizes in the device's tuning table it runs with (`kernels.tuning`); empty: none.
        rounding: where it rounds besides its sums and its output; the judge follows it.
    """

    devices: frozenset[str]
    weights: frozenset[str]
    dtypes: frozenset[str]
    activations: frozenset[ActivationName]
    act_order: bool = False
    bias: bool = False
    clamp: bool = False
    router_weight_on_input: bool = False
    zero_tokens: bool = False
    sentinel_ids: bool = False
    graph_safe: bool = False
    deterministic: bool = False
    hidden_multiple: int = 1
    inner_multiple: int = 1
    scorings: frozenset[Scoring] | None = None
    renormalised: bool = False
    max_tokens: int | None = None
    layout: str = ""
    packages: tuple[Package, ...] = ()
    kernels: tuple[str, ...] = ()
    tiles: str = ""
    rounding: Rounding = EXACT

    def decline(self, problem: MoEProblem, device: Device) -> Decline | None:
        """Every declared fact that `problem` on `device` breaks; None when all hold."""
        checks = {
            f"runs on {in_order(self.devices)}, this is {device.key}": device.key not in self.devices,
            f"reads {', '.join(sorted(self.weights))} weights, these are {problem.weights.name}": (
                problem.weights.family not in self.weights
            ),
            "takes no act-order columns, the experts have them": problem.act_order and not self.act_order,
            f"computes in {', '.join(sorted(self.dtypes))}, the model in {problem.dtype}": (
                problem.dtype not in self.dtypes
            ),
            f"knows {', '.join(sorted(self.activations))}, the model uses {problem.activation.name}": (
                problem.activation.name not in self.activations
            ),
            "takes no biases, the experts have them": problem.bias and not self.bias,
            f"takes no activation limit, the model has {problem.activation.limit}": (
                problem.activation.limit is not None and not self.clamp
            ),
            "cannot apply the routing weight to the input": (
                problem.router_weight_on_input and not self.router_weight_on_input
            ),
            "needs every expert on this rank": problem.local_experts < problem.experts and not self.sentinel_ids,
            f"needs hidden % {self.hidden_multiple} == 0, found {problem.hidden}": (
                problem.hidden % self.hidden_multiple != 0
            ),
            f"needs inner % {self.inner_multiple} == 0, found {problem.inner} per rank": (
                problem.inner % self.inner_multiple != 0
            ),
            f"routes by {', '.join(sorted(self.scorings or ()))} itself, the model by {problem.routing.scoring}": (
                self.scorings is not None and problem.routing.scoring not in self.scorings
            ),
            "renormalises the weights of the chosen experts, the model does not": (
                self.renormalised and not problem.routing.renormalise
            ),
        }
        checks |= dict.fromkeys(missing_packages(self.packages) if device.present else (), True)
        return Decline.when(checks)


class Prepared(Protocol):
    """Weights in the layout that one backend's kernel reads."""

    @property
    def nbytes(self) -> int:
        """Bytes this layout keeps beyond the weights it was made from (0 when it only views them)."""
        ...


P = TypeVar("P", bound=Prepared)


class Backend(ABC, Generic[P]):
    """What runner cores and fused functions share."""

    facts: Facts

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        """None, or every reason against; touches no accelerator and imports no library."""
        return self.facts.decline(problem, device)

    @abstractmethod
    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> P:
        """The layout this backend's kernel reads, made once at load."""


class RunnerCore(Backend[P]):
    """Rows grouped by expert in, rows out: GEMM, activation, GEMM."""

    layouts: frozenset[RowLayout]
    row_block: int = 1
    """Row alignment of each expert in the PADDED layout."""

    @abstractmethod
    def run(self, prepared: P, rows: ExpertRows, out_RD: Tensor, workspace: Workspace) -> None:
        """Writes `out_RD` for every real row; nobody reads the others."""


class FusedFunc(Backend[P]):
    """Tokens and routing in, tokens out: dispatch and combine are inside."""

    dispatcher: str
    """The token dispatcher it stands in for, set at registration."""

    @abstractmethod
    def run(self, prepared: P, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        """Writes the weighted sum of the experts into all of `out_TD` (zeros where every id is a sentinel)."""


AnyBackend = RunnerCore[Any] | FusedFunc[Any]
