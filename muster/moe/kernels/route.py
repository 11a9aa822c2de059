"""The router's choice for a few tokens on one thread: softmax over all experts, then the best K."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from muster.moe.backend import Routed
from muster.moe.problem import RoutingRule
from muster.native.jit import F32, I32, I64, LANES, Emitter, F32x8, Kernel, Target, Value, host
from muster.native.mathematics import exp

_SIGN, _ALL, _TAKEN = 0x80000000, 0xFFFFFFFF, 0


def routes(rule: RoutingRule, experts: int) -> bool:
    """Whether `route` knows the rule: softmax without a selection bias or groups, and experts in whole vectors."""
    plain = rule.scoring == "softmax" and not rule.selection_bias and rule.groups == 1
    return plain and experts % LANES == 0


def route(logits_TE: Tensor, rule: RoutingRule) -> Routed:
    """What `routing.route` answers: the same ids, weights within rounding. `logits_TE` float32 and contiguous."""
    tokens, experts = logits_TE.shape
    ids_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64)
    weights_TK = torch.empty(tokens, rule.top_k)
    taken = torch.empty(experts)
    addresses = (logits_TE.data_ptr(), ids_TK.data_ptr(), weights_TK.data_ptr(), taken.data_ptr())
    route_kernel(rule, experts, host())(tokens, *addresses)
    return Routed(ids_TK, weights_TK)


@cache
def route_kernel(rule: RoutingRule, experts: int, target: Target) -> Kernel:
    """Arguments: T, the addresses of logits, ids, weights, and of scratch `[E]`."""
    e = Emitter("route", target)
    tokens, logits, ids, weights, scratch = (e.argument(slot) for slot in range(5))
    with e.loop(0, tokens) as token:
        source = logits + token * (4 * experts)
        ids_K, weights_K = ids + token * (8 * rule.top_k), weights + token * (4 * rule.top_k)
        _choose(e, rule.top_k, experts, source, scratch, ids_K, weights_K)
        _weigh(e, rule, experts, source, weights_K)
    return e.compile()


def _choose(e: Emitter, top_k: int, experts: int, source: Value, scratch: Value, ids_K: Value, chosen_K: Value) -> None:
    """The K largest logits, equal ones by lowest id: their ids and themselves."""
    with e.loop(0, experts) as expert:
        e.store(_rank(e, e.load(F32, source + expert * 4)), scratch + expert * 4)
    with e.loop(0, top_k) as k:
        best = e.variable(e.constant(I64, 0))
        highest = e.variable(e.constant(I32, 0))
        with e.loop(0, experts) as expert:
            rank = e.load(I32, scratch + expert * 4)
            higher = rank.compare(">", highest.get())
            best.set(e.select(higher, expert, best.get()))
            highest.set(e.select(higher, rank, highest.get()))
        e.store(best.get(), ids_K + k * 8)
        e.store(e.load(F32, source + best.get() * 4), chosen_K + k * 4)
        e.store(e.constant(I32, _TAKEN), scratch + best.get() * 4)


def _rank(e: Emitter, logit: Value) -> Value:
    """A float as an unsigned integer of the same order: minus nought equals nought, a NaN stands above all numbers."""
    bits = e.bitcast(logit + 0.0, I32)
    ordered = e.select(bits.compare(">=", _SIGN), bits ^ _ALL, bits | _SIGN)
    return e.select(logit.compare("==", logit), ordered, e.constant(I32, _ALL))


def _weigh(e: Emitter, rule: RoutingRule, experts: int, source: Value, chosen_K: Value) -> None:
    """The chosen logits become weights."""
    largest = e.load(F32, chosen_K)
    among_chosen = e.variable(e.constant(F32, 0))
    with e.loop(0, rule.top_k) as k:
        weight = exp(e, e.load(F32, chosen_K + k * 4) - largest)
        e.store(weight, chosen_K + k * 4)
        among_chosen.set(among_chosen.get() + weight)

    if rule.softmax_after_top_k:
        divisor = among_chosen.get()
    else:
        everyone = e.variable(e.constant(F32x8, 0))
        with e.loop(0, experts, LANES) as expert:
            everyone.set(everyone.get() + exp(e, e.load(F32x8, source + expert * 4) - e.splat(largest, LANES)))
        total = e.sum_lanes(everyone.get())
        divisor = among_chosen.get() + total * rule.epsilon if rule.renormalise else total
    factor = e.constant(F32, rule.scaling_factor) / divisor
    with e.loop(0, rule.top_k) as k:
        e.store(e.load(F32, chosen_K + k * 4) * factor, chosen_K + k * 4)
