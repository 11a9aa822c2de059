"""One backend bound to one layer's weights: tokens and routing in, tokens out, whatever kind of backend it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from muster.moe.backend import AnyBackend, FusedFunc, Prepared, Routed, RowLayout, RunnerCore
from muster.moe.dispatch import TokenDispatcher, load_dispatcher
from muster.moe.problem import MoEProblem
from muster.moe.registry import backends
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace


class Experts(ABC):
    """Prepared weights and the backend that reads them.

    Attributes:
        name: the backend's.
        prepared: its layout of the weights.
    """

    def __init__(self, name: str, prepared: Prepared) -> None:
        self.name = name
        self.prepared = prepared

    @abstractmethod
    def run(self, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        """Writes each token's weighted sum of experts into all of `out_TD`, which may not alias `x_TD`."""


def bind(name: str, problem: MoEProblem, weights: ExpertWeights, dispatcher: str = "standard") -> Experts:
    """Prepares the weights for the backend of that name; a runner core gets its rows from `dispatcher`.

    Raises:
        UsageError: no such backend or dispatcher.
    """
    return bind_all((name,), problem, weights, dispatcher)[name]


def bind_all(
    names: Iterable[str], problem: MoEProblem, weights: ExpertWeights, dispatcher: str = "standard"
) -> Mapping[str, Experts]:
    """`bind` for several backends; those that share a layout get the same prepared weights."""
    prepared: dict[str, Prepared] = {}
    bound: dict[str, Experts] = {}
    for name in names:
        backend: AnyBackend = backends().get(name)
        layout = backend.facts.layout or name
        if layout not in prepared:
            prepared[layout] = backend.prepare(problem, weights)
        if isinstance(backend, FusedFunc):
            bound[name] = _FusedExperts(name, prepared[layout], backend)
        else:
            bound[name] = _CoreExperts(name, prepared[layout], backend, load_dispatcher(dispatcher)(problem))
    return bound


class _FusedExperts(Experts):
    def __init__(self, name: str, prepared: Prepared, func: FusedFunc[Any]) -> None:
        super().__init__(name, prepared)
        self._func = func

    def run(self, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        self._func.run(self.prepared, x_TD, routed, out_TD, workspace)


class _CoreExperts(Experts):
    def __init__(self, name: str, prepared: Prepared, core: RunnerCore[Any], dispatcher: TokenDispatcher) -> None:
        super().__init__(name, prepared)
        self._core = core
        self._dispatcher = dispatcher
        self._layout = next(layout for layout in RowLayout if layout in core.layouts)

    def run(self, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        dispatched = self._dispatcher.dispatch(x_TD, routed, self._layout, self._core.row_block, workspace)
        x_RD = dispatched.rows.x_RD
        y_RD = workspace.take("rows out", x_RD.shape, x_RD.dtype)
        self._core.run(self.prepared, dispatched.rows, y_RD, workspace)
        self._dispatcher.combine(y_RD, dispatched, out_TD, workspace)
