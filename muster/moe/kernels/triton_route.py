"""The router's choice on a GPU, all rules in one kernel: scores, selection bias, groups, the best K, their weights.

One program per token. Choosing compares integers that order as the scores do, with the expert's id below them, so that
equal scores go to the lowest id and the order is the same in every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from muster.moe.backend import Routed
from muster.moe.problem import RoutingRule

_EXPERTS_PER_WARP = 512
"""One warp needs no shared memory to find a maximum; it keeps this many scores in registers."""
_SCORINGS = {"softmax": 0, "sigmoid": 1, "sqrt-softplus": 2}


def route(logits_TE: Tensor, rule: RoutingRule, selection_bias_E: Tensor | None = None) -> Routed:
    """What `routing.route` answers, whose rule and bias were checked: the same ids, weights within float32 rounding.

    Where a selection bias or groups make scores decide, two that differ by their rounding may change places.

    Args:
        logits_TE: `[T, E]` on a GPU, contiguous, any float dtype.
        rule: the rule.
        selection_bias_E: float32 `[E]`, given exactly when the rule has a selection bias.
    """
    tokens, experts = logits_TE.shape
    ids_TK = torch.empty(tokens, rule.top_k, dtype=torch.int64, device=logits_TE.device)
    weights_TK = torch.empty(tokens, rule.top_k, dtype=torch.float32, device=logits_TE.device)
    if not tokens:
        return Routed(ids_TK, weights_TK)
    block = triton.next_power_of_2(experts)
    _route[(tokens,)](
        logits_TE,
        logits_TE if selection_bias_E is None else selection_bias_E,
        ids_TK,
        weights_TK,
        rule.scaling_factor,
        rule.epsilon,
        EXPERTS=experts,
        BLOCK=block,
        TOP_K=rule.top_k,
        BLOCK_K=triton.next_power_of_2(rule.top_k),
        SCORING=_SCORINGS[rule.scoring],
        SOFTMAX_AFTER=rule.softmax_after_top_k,
        BIAS=selection_bias_E is not None,
        GROUPS=rule.groups,
        KEPT=rule.groups_kept,
        RENORMALISE=rule.renormalise,
        num_warps=max(1, min(8, block // _EXPERTS_PER_WARP)),
    )
    return Routed(ids_TK, weights_TK)


@triton.jit  # type: ignore[untyped-decorator]
def _route(  # type: ignore[no-untyped-def]
    logits_TE,
    bias_E,
    ids_TK,
    weights_TK,
    scaling_factor,
    epsilon,
    EXPERTS: tl.constexpr,
    BLOCK: tl.constexpr,
    TOP_K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    SCORING: tl.constexpr,
    SOFTMAX_AFTER: tl.constexpr,
    BIAS: tl.constexpr,
    GROUPS: tl.constexpr,
    KEPT: tl.constexpr,
    RENORMALISE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    there = expert < EXPERTS
    logits = tl.load(logits_TE + token * EXPERTS + expert, mask=there, other=float("-inf")).to(tl.float32)
    scores = logits if SOFTMAX_AFTER else _scores(logits, there, SCORING)
    ranked = scores if BIAS or GROUPS > 1 else logits
    if BIAS:
        ranked += tl.load(bias_E + expert, mask=there, other=0.0)
    keys = _keys(ranked, expert, there)
    if GROUPS > 1:
        keys = _keep_groups(keys, ranked, expert, EXPERTS // GROUPS, GROUPS, KEPT)

    slot = tl.arange(0, BLOCK_K)
    ids = tl.zeros((BLOCK_K,), tl.int64)
    chosen = tl.zeros((BLOCK_K,), tl.float32)
    for k in tl.static_range(TOP_K):
        best = tl.max(keys, axis=0)
        number = _expert_of(best)
        score = tl.sum(tl.where(expert == number, scores, 0.0), axis=0)
        ids = tl.where(slot == k, number.to(tl.int64), ids)
        chosen = tl.where(slot == k, score, chosen)
        keys = tl.where(expert == number, _NOBODY, keys)

    real = slot < TOP_K
    if SOFTMAX_AFTER:
        # The first one chosen is the largest.
        largest = tl.sum(tl.where(slot == 0, chosen, 0.0), axis=0)
        chosen = tl.where(real, _exp(chosen - largest), 0.0)
        chosen = tl.div_rn(chosen, tl.sum(chosen, axis=0))
    elif RENORMALISE:
        chosen = tl.div_rn(chosen, tl.sum(chosen, axis=0) + epsilon)
    tl.store(ids_TK + token * TOP_K + slot, ids, mask=real)
    tl.store(weights_TK + token * TOP_K + slot, chosen * scaling_factor, mask=real)


_NOBODY: tl.constexpr = tl.constexpr(-(2**63))
"""The key of an expert that cannot be chosen (any more)."""


@triton.jit
def _keys(scores, expert, there):  # type: ignore[no-untyped-def]
    """int64 that orders as (score, lowest id): minus nought equals nought, a NaN stands above all numbers."""
    bits = (scores + 0.0).to(tl.int32, bitcast=True)
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    ordered = tl.where(scores == scores, ordered, 0x7FFFFFFF)
    keys = (ordered.to(tl.int64) << 32) | (0xFFFFFF - expert).to(tl.int64)
    return tl.where(there, keys, _NOBODY)


@triton.jit
def _expert_of(key):  # type: ignore[no-untyped-def]
    return 0xFFFFFF - (key & 0xFFFFFF).to(tl.int32)


@triton.jit  # type: ignore[untyped-decorator]
def _keep_groups(  # type: ignore[no-untyped-def]
    keys, ranked, expert, SIZE: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr
):
    """The keys of experts in the kept groups; those of the others become nobody's."""
    group = expert // SIZE
    numbers = tl.arange(0, triton.next_power_of_2(GROUPS))
    strengths = tl.zeros((triton.next_power_of_2(GROUPS),), tl.float32)
    for g in tl.static_range(GROUPS):
        members = tl.where(group == g, keys, _NOBODY)
        first = _expert_of(tl.max(members, axis=0))
        second = _expert_of(tl.max(tl.where(expert == first, _NOBODY, members), axis=0))
        strength = tl.sum(tl.where(expert == first, ranked, 0.0), axis=0)
        strength += tl.sum(tl.where(expert == second, ranked, 0.0), axis=0)
        strengths = tl.where(numbers == g, strength, strengths)
    group_keys = _keys(strengths, numbers, numbers < GROUPS)
    kept = tl.zeros_like(keys).to(tl.int1)
    for _ in tl.static_range(KEPT):
        best = _expert_of(tl.max(group_keys, axis=0))
        kept = kept | (group == best)
        group_keys = tl.where(numbers == best, _NOBODY, group_keys)
    return tl.where(kept, keys, _NOBODY)


@triton.jit  # type: ignore[untyped-decorator]
def _scores(logits, there, SCORING: tl.constexpr):  # type: ignore[no-untyped-def]
    if SCORING == 0:
        powers = tl.where(there, _exp(logits - tl.max(logits, axis=0)), 0.0)
        scores = tl.div_rn(powers, tl.sum(powers, axis=0))
    else:
        small = _exp(-tl.abs(logits))
        if SCORING == 1:
            scores = tl.div_rn(tl.where(logits < 0, small, 1.0), small + 1.0)
            scores = tl.where(logits == logits, scores, logits)
        else:
            scores = tl.sqrt_rn(tl.where(logits > 0, logits, 0.0) + _log1p(small))
    return scores


@triton.jit
def _exp(x):  # type: ignore[no-untyped-def]
    """e^x for x <= 0, 0 below the normal numbers; NaN stays.

    A GPU's exponential is of base 2. What rounding the exponent loses, up to 1e-5 of the result, is put back.
    """
    exponent = x * 1.4426950408889634
    lost = tl.fma(x, 1.4426950408889634, -exponent) + x * 1.925963033500e-8
    power = tl.exp2(exponent)
    return tl.where(x < -87.3, 0.0, tl.fma(power, lost * 0.6931471805599453, power))


@triton.jit
def _log1p(a):  # type: ignore[no-untyped-def]
    """log(1 + a) for 0 <= a <= 1, as 2 atanh(a / (2 + a)): a GPU's logarithm is absolute, this one relative."""
    s = tl.div_rn(a, a + 2.0)
    q = s * s
    series = q * (1 / 15) + 1 / 13
    series = series * q + 1 / 11
    series = series * q + 1 / 9
    series = series * q + 1 / 7
    series = series * q + 1 / 5
    series = series * q + 1 / 3
    return 2 * s * (series * q + 1.0)
