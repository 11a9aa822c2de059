"""Ways to send tokens to the wrong experts or to weight them wrongly: each gives the routing that the bug makes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem

Misroute = Callable[[MoEProblem, Routed], Routed]
MisrouteRow = Callable[[MoEProblem, Routed, int], Routed]
"""The same for the last of one token's rows that are computed here."""


def here(problem: MoEProblem, routed: Routed) -> Tensor:
    """Whether the expert of each slot `[T, K]` is on this rank."""
    local = routed.ids_TK - problem.first_expert
    return (local >= 0) & (local < problem.local_experts)


def last_expert_dropped(problem: MoEProblem, routed: Routed, token: int) -> Routed:
    """It is not computed."""
    slot = _last(problem, routed, token)
    weights_TK = routed.weights_TK.clone()
    weights_TK[token, slot] = 0.0
    return Routed(routed.ids_TK, weights_TK)


def slot_added_twice(problem: MoEProblem, routed: Routed, token: int) -> Routed:
    """It is added a second time."""
    slot = _last(problem, routed, token)
    weights_TK = routed.weights_TK.clone()
    weights_TK[token, slot] *= 2.0
    return Routed(routed.ids_TK, weights_TK)


def row_to_next_expert(problem: MoEProblem, routed: Routed, token: int) -> Routed:
    """At the edge of a tile, it is multiplied by the weights of the expert after its own."""
    slot = _last(problem, routed, token)
    ids_TK = routed.ids_TK.clone()
    ids_TK[token, slot] = _next(problem, ids_TK[token, slot])
    return Routed(ids_TK, routed.weights_TK)


def ids_one_up(problem: MoEProblem, routed: Routed) -> Routed:
    """Every row is multiplied by the weights of the expert after its own."""
    return Routed(routed.ids_TK.where(~here(problem, routed), _next(problem, routed.ids_TK)), routed.weights_TK)


def sentinel_is_first(problem: MoEProblem, routed: Routed) -> Routed:
    """Ids of no expert are clamped, as an index into the weights would be."""
    nowhere = (routed.ids_TK < 0) | (routed.ids_TK >= problem.experts)
    return Routed(routed.ids_TK.masked_fill(nowhere, problem.first_expert), routed.weights_TK)


def others_taken_in(problem: MoEProblem, routed: Routed) -> Routed:
    """Experts of other ranks are taken modulo the number of those here."""
    return Routed(problem.first_expert + routed.ids_TK % problem.local_experts, routed.weights_TK)


def weights_omitted(_: MoEProblem, routed: Routed) -> Routed:
    """Experts are added up unweighted."""
    return Routed(routed.ids_TK, torch.ones_like(routed.weights_TK))


def weights_twice(_: MoEProblem, routed: Routed) -> Routed:
    """Rows are weighted when they leave the second product, and again when they are summed."""
    return Routed(routed.ids_TK, routed.weights_TK.square())


def not_renormalised(_: MoEProblem, routed: Routed) -> Routed:
    """The K weights are left as shares of all experts: their sum is less than one."""
    return Routed(routed.ids_TK, routed.weights_TK * 0.8)


def scaled_twice(problem: MoEProblem, routed: Routed) -> Routed:
    """The scaling factor is in the weights already."""
    return Routed(routed.ids_TK, routed.weights_TK * problem.routing.scaling_factor)


def weights_by_other_slot(_: MoEProblem, routed: Routed) -> Routed:
    """Ids are sorted, their weights are not."""
    return Routed(routed.ids_TK, routed.weights_TK.roll(1, -1))


def _next(problem: MoEProblem, ids: Tensor) -> Tensor:
    return problem.first_expert + (ids - problem.first_expert + 1) % problem.local_experts


def _last(problem: MoEProblem, routed: Routed, token: int) -> int:
    """The last slot of a token that is computed here."""
    return int(here(problem, routed)[token].nonzero()[-1])
