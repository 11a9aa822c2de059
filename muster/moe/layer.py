"""The Mixture-of-Experts layer of a model: router, the planned experts, and a shared expert where there is one."""

from __future__ import annotations

import math
from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import functional

from muster import native
from muster.device import DTYPES, Device
from muster.moe.backend import Routed
from muster.moe.experts import Experts, bind_all
from muster.moe.kernels import route as fast
from muster.moe.problem import MoEProblem, RoutingRule
from muster.moe.reference import expert_layer
from muster.moe.registry import backends
from muster.moe.routing import check_rule, route
from muster.moe.weights import ExpertWeights, Gate
from muster.plan import Choice
from muster.workspace import Workspace

__all__ = ["Gate", "MoELayer"]


class MoELayer:
    """Tokens in, tokens out.

    Args:
        problem: what to compute.
        gate: the router's weights; kept in float32, and so are the logits.
        experts: the stored weights; each planned backend prepares its own layout of them once, here.
        choice: which backend runs for which token count.
        device: where.
        shared: computed on every token and added, or None.
        workspace: scratch memory; give the layers of a model the same one, as they run one after the other.

    Attributes:
        nbytes: bytes of the gate, of the stored experts, and of what the layouts keep beyond them; `shared` excluded.

    Raises:
        UsageError: the routing rule does not fit the gate, or the choice names a backend that is not registered.
    """

    def __init__(
        self,
        problem: MoEProblem,
        gate: Gate,
        experts: ExpertWeights,
        choice: Choice,
        device: Device,
        shared: Callable[[Tensor], Tensor] | None = None,
        workspace: Workspace | None = None,
    ) -> None:
        check_rule(problem.routing, problem.experts, gate.selection_bias_E)
        target = device.torch_device
        self._gate_ED = gate.weight_ED.to(target, torch.float32)
        self._gate_bias_E = None if gate.bias_E is None else gate.bias_E.to(target, torch.float32)
        self._selection_bias_E = None if gate.selection_bias_E is None else gate.selection_bias_E.to(target)
        self._problem = problem
        self._dtype = DTYPES[problem.dtype]
        self._weights = experts
        self._route = self._router(problem.routing, problem.experts, device)
        self._shared = shared
        self._workspace = workspace or Workspace(target)
        self._choice = choice
        self._bound = bind_all(choice.backends, problem, experts, choice.dispatcher)
        layouts = {id(bound.prepared): bound.prepared.nbytes for bound in self._bound.values()}
        self._used: dict[str, None] = {}
        gate_bytes = sum(t.nbytes for t in (self._gate_ED, self._gate_bias_E, self._selection_bias_E) if t is not None)
        self.nbytes = gate_bytes + experts.nbytes + sum(layouts.values())

    @property
    def backends_used(self) -> tuple[str, ...]:
        """Names of the backends that have run, in the order of their first run."""
        return tuple(self._used)

    def distances(self, x_TD: Tensor) -> dict[str, float]:
        """Of each planned backend, how far it is from the float64 reference on these tokens, rounding as it declares.

        The distance is the relative RMS of the worst token, measured against the typical one; NaN where it gave NaN.
        """
        x_TD = x_TD.contiguous()
        routed = self._route(functional.linear(x_TD.float(), self._gate_ED, self._gate_bias_E))
        roundings = {name: backends().get(name).facts.rounding for name in self._bound}
        truths = {
            rounding: expert_layer(self._problem, self._weights, x_TD, routed, rounding=rounding)
            for rounding in set(roundings.values())
        }
        return {
            name: self._distance(experts, x_TD, routed, truths[roundings[name]])
            for name, experts in self._bound.items()
        }

    def _distance(self, experts: Experts, x_TD: Tensor, routed: Routed, truth_TD: Tensor) -> float:
        out_TD = torch.full_like(x_TD, math.nan)
        experts.run(x_TD, routed, out_TD, self._workspace)
        worst = (out_TD.double() - truth_TD).square().mean(-1).sqrt().amax()
        return float(worst / truth_TD.square().mean().sqrt())

    def __call__(self, x_TD: Tensor) -> Tensor:
        """`[T, D]` to `[T, D]` in the problem's dtype; the router sees the tokens before they are rounded to it."""
        logits_TE = functional.linear(x_TD.float(), self._gate_ED, self._gate_bias_E)
        x_TD = x_TD.to(self._dtype).contiguous()
        out_TD = torch.empty_like(x_TD)
        tokens = len(x_TD)
        if not tokens:
            return out_TD
        experts = self._bound[self._choice.backend_for(tokens)]
        experts.run(x_TD, self._route(logits_TE), out_TD, self._workspace)
        self._used[experts.name] = None
        return out_TD if self._shared is None else out_TD.add_(self._shared(x_TD))

    def _router(self, rule: RoutingRule, experts: int, device: Device) -> Callable[[Tensor], Routed]:
        """The kernel for the rules it knows, else the reference."""
        if device.key == "cpu" and native.available() and fast.routes(rule, experts):
            return lambda logits_TE: fast.route(logits_TE, rule)
        if device.key != "cpu" and find_spec("triton") is not None:
            from muster.moe.kernels import triton_route

            return lambda logits_TE: triton_route.route(logits_TE, rule, self._selection_bias_E)
        return lambda logits_TE: route(logits_TE, rule, self._selection_bias_E)
