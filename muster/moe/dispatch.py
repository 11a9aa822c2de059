"""The token dispatcher's contract: tokens to the experts that want them, and the results back.

A dispatcher stands between the router and a runner core. A fused function does a dispatcher's work itself and names
it at registration.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from torch import Tensor

from muster.errors import UsageError
from muster.moe.backend import ExpertRows, Routed, RowLayout
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace

DISPATCHERS: Mapping[str, str] = MappingProxyType({"standard": "muster.moe.dispatchers.standard:StandardDispatcher"})
"""Where each dispatcher lives, by name: `module:class`."""


@dataclass(frozen=True, eq=False)
class Dispatched:
    """Rows on their way through the experts, and how to bring them home.

    Attributes:
        rows: what the runner core gets.
        row_TK: int64, the row that holds each (token, slot); -1 where the slot is computed nowhere on this rank.
        weights_TK: float32, what each row's result is multiplied by; None when the weight is already in the input.
    """

    rows: ExpertRows
    row_TK: Tensor
    weights_TK: Tensor | None


class TokenDispatcher(ABC):
    """Moves tokens to experts and back."""

    def __init__(self, problem: MoEProblem) -> None:
        self.problem = problem

    @abstractmethod
    def dispatch(
        self, x_TD: Tensor, routed: Routed, layout: RowLayout, row_block: int, workspace: Workspace
    ) -> Dispatched:
        """Rows grouped by local expert, in token order within an expert.

        Args:
            x_TD: tokens, in the problem's dtype.
            routed: ids may repeat, be sentinels, or belong to other ranks; those slots get no row.
            layout: how rows lie.
            row_block: row alignment of each expert in the padded layout.
            workspace: owns `rows.x_RD`.
        """

    @abstractmethod
    def combine(self, y_RD: Tensor, dispatched: Dispatched, out_TD: Tensor, workspace: Workspace) -> None:
        """Writes into all of `out_TD` each token's weighted rows, summed in float32 in slot order.

        A token's sum depends on no other token; tokens with no row get zeros.
        """


def load_dispatcher(name: str) -> type[TokenDispatcher]:
    """The dispatcher class of that name.

    Raises:
        UsageError: no such dispatcher.
    """
    if name not in DISPATCHERS:
        raise UsageError("token dispatcher", found=repr(name), expected=f"one of {', '.join(DISPATCHERS)}")
    module, _, attribute = DISPATCHERS[name].partition(":")
    dispatcher: type[TokenDispatcher] = getattr(importlib.import_module(module), attribute)
    return dispatcher
