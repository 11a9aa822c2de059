"""From the checkpoint's words for an expert layer to those of the kernels, in one place."""

from __future__ import annotations

from typing import cast

from muster.checkpoint.spec import MoESpec, RoutingSpec
from muster.device import Device
from muster.formats.spec import Format
from muster.moe.problem import Activation, ActivationName, MoEProblem, RoutingRule


def moe_problem(moe: MoESpec, hidden: int, weights: Format, device: Device, act_order: bool = False) -> MoEProblem:
    """What one expert layer with all its experts on `device` must compute."""
    return MoEProblem(
        hidden=hidden,
        inner=moe.inner,
        experts=moe.experts,
        routing=routing_rule(moe.routing),
        local_experts=moe.experts,
        weights=weights,
        act_order=act_order,
        dtype=device.activations,
        activation=Activation(cast("ActivationName", moe.activation), moe.limit, moe.alpha),
        bias=moe.bias,
    )


def routing_rule(spec: RoutingSpec) -> RoutingRule:
    """The rule; the gate's own bias is a weight and not part of it."""
    return RoutingRule(
        top_k=spec.top_k,
        scoring=spec.scoring,
        softmax_after_top_k=spec.softmax_after_top_k,
        selection_bias=spec.selection_bias,
        groups=spec.groups,
        groups_kept=spec.groups_kept,
        renormalise=spec.renormalise,
        scaling_factor=spec.scaling_factor,
        epsilon=spec.epsilon,
    )
