"""Every routing rule against a slow float64 router written here, and the properties that hold for all rules."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import UsageError
from muster.moe.problem import RoutingRule
from muster.moe.routing import route

EXPERTS = 16
RULES = {
    "mixtral": RoutingRule(top_k=2),
    "qwen3": RoutingRule(top_k=8),
    "olmoe": RoutingRule(top_k=8, renormalise=False),
    "gpt-oss": RoutingRule(top_k=4, softmax_after_top_k=True),
    "deepseek-v3": RoutingRule(
        top_k=4,
        scoring="sigmoid",
        selection_bias=True,
        groups=4,
        groups_kept=2,
        scaling_factor=2.5,
        epsilon=1e-20,
    ),
    "kimi-k2": RoutingRule(top_k=8, scoring="sigmoid", selection_bias=True, scaling_factor=2.827, epsilon=1e-20),
    "minimax-m2": RoutingRule(top_k=8, scoring="sigmoid", selection_bias=True, epsilon=1e-20),
    "sigmoid, grouped, no bias, no renorm": RoutingRule(
        top_k=3, scoring="sigmoid", groups=2, groups_kept=1, renormalise=False
    ),
    "softmax with selection bias": RoutingRule(top_k=4, selection_bias=True),
    "sqrt-softplus": RoutingRule(top_k=6, scoring="sqrt-softplus", selection_bias=True, scaling_factor=1.5),
    "all experts": RoutingRule(top_k=EXPERTS),
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


def slow_route(logits: list[float], rule: RoutingRule, bias: list[float] | None) -> tuple[list[int], list[float]]:
    """One token, Python floats, one step per sentence of the rule."""
    experts = range(len(logits))
    if rule.scoring == "sigmoid":
        scores = [1 / (1 + math.exp(-x)) for x in logits]
    elif rule.scoring == "sqrt-softplus":
        scores = [math.sqrt(math.log1p(math.exp(x))) for x in logits]
    else:
        total = sum(math.exp(x) for x in logits)
        scores = [math.exp(x) / total for x in logits]
    if rule.softmax_after_top_k:
        scores = list(logits)
    choice = [s + b for s, b in zip(scores, bias or [0.0] * len(logits), strict=True)]
    size = len(logits) // rule.groups
    strength = [sum(sorted(choice[g * size : (g + 1) * size])[-2:]) for g in range(rule.groups)]
    kept = sorted(range(rule.groups), key=lambda g: (-strength[g], g))[: rule.groups_kept]
    ids = sorted((e for e in experts if e // size in kept), key=lambda e: (-choice[e], e))[: rule.top_k]
    chosen = [scores[e] for e in ids]
    if rule.softmax_after_top_k:
        chosen = [math.exp(s) for s in chosen]
    if rule.renormalise or rule.softmax_after_top_k:
        chosen = [c / (sum(chosen) + rule.epsilon) for c in chosen]
    return ids, [c * rule.scaling_factor for c in chosen]


def bias_for(rule: RoutingRule, seed: int = 1, offset: float = 0.0) -> torch.Tensor | None:
    if not rule.selection_bias:
        return None
    return torch.randn(EXPERTS, generator=torch.Generator().manual_seed(seed)) * 0.1 + offset


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rule_matches_slow_float64_router(rule, dtype):
    logits = torch.randn(200, EXPERTS, generator=torch.Generator().manual_seed(0)).to(dtype)
    bias = bias_for(rule)
    routed = route(logits, rule, bias)
    assert routed.ids_TK.dtype is torch.int64
    assert routed.weights_TK.dtype is torch.float32
    assert routed.ids_TK.is_contiguous()
    assert routed.weights_TK.is_contiguous()
    for token, row in enumerate(logits.double().tolist()):
        ids, weights = slow_route(row, rule, None if bias is None else bias.double().tolist())
        assert routed.ids_TK[token].tolist() == ids
        assert routed.weights_TK[token].tolist() == pytest.approx(weights, rel=3e-6)


@rules
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_permuting_experts_permutes_ids(rule, data):
    if rule.groups > 1:
        order = [g * 4 + i for g in data.draw(st.permutations(range(4))) for i in range(4)]
        rule = replace(rule, groups=4, groups_kept=2)
    else:
        order = data.draw(st.permutations(range(EXPERTS)))
    logits = torch.tensor([data.draw(st.permutations(range(EXPERTS)))]) * 0.25 - 2
    bias = bias_for(rule)
    order = torch.tensor(order)
    plain = route(logits, rule, bias)
    permuted = route(logits[:, order], rule, None if bias is None else bias[order])
    assert torch.equal(order[permuted.ids_TK], plain.ids_TK)
    torch.testing.assert_close(permuted.weights_TK, plain.weights_TK, rtol=1e-6, atol=0)


@rules
@given(factor=st.floats(0.125, 8.0, width=32), seed=st.integers(0, 2**20))
@settings(max_examples=20, deadline=None)
def test_scaling_factor_is_applied_exactly_once(rule, factor, seed):
    logits = torch.randn(3, EXPERTS, generator=torch.Generator().manual_seed(seed))
    one = route(logits, replace(rule, scaling_factor=1.0), bias_for(rule))
    scaled = route(logits, replace(rule, scaling_factor=factor), bias_for(rule))
    assert torch.equal(one.ids_TK, scaled.ids_TK)
    torch.testing.assert_close(scaled.weights_TK, one.weights_TK * factor, rtol=1e-6, atol=0)


@given(scores=st.lists(st.integers(-2, 2), min_size=EXPERTS, max_size=EXPERTS), top_k=st.integers(1, EXPERTS))
@settings(max_examples=100, deadline=None)
def test_equal_scores_go_to_the_lowest_id(scores, top_k):
    ids = route(torch.tensor([scores], dtype=torch.bfloat16), RoutingRule(top_k=top_k)).ids_TK[0].tolist()
    assert ids == sorted(range(EXPERTS), key=lambda e: (-scores[e], e))[:top_k]


@given(seed=st.integers(0, 2**20), offset=st.sampled_from([0.0, -5.0, -1000.0, 5.0]), kept=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_experts_of_dropped_groups_are_never_chosen(seed, offset, kept):
    """Not even when every biased score is negative, where a mask of zeros would win."""
    rule = replace(RULES["deepseek-v3"], groups_kept=kept, top_k=min(4 * kept, 6))
    bias = bias_for(rule, seed, offset)
    logits = torch.randn(8, EXPERTS, generator=torch.Generator().manual_seed(seed))
    strength = (logits.sigmoid() + bias).view(8, 4, 4).sort(-1).values[..., -2:].sum(-1)
    allowed = strength.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    for ids, groups in zip(route(logits, rule, bias).ids_TK.tolist(), allowed.tolist(), strict=True):
        assert {e // 4 for e in ids} <= set(groups)
        assert len(set(ids)) == rule.top_k


def test_selection_bias_never_reaches_the_weights():
    rule = replace(RULES["kimi-k2"], renormalise=False, scaling_factor=1.0)
    logits = torch.randn(5, EXPERTS, generator=torch.Generator().manual_seed(3))
    for offset in (0.0, 100.0, -100.0):
        routed = route(logits, rule, bias_for(rule, offset=offset))
        assert torch.equal(routed.weights_TK, logits.sigmoid().gather(1, routed.ids_TK))


def test_selection_bias_decides_below_bf16_resolution():
    bias = torch.full((EXPERTS,), 8.0)
    bias[11] += 1e-3
    assert bias.bfloat16().unique().numel() == 1
    rule = RoutingRule(top_k=1, scoring="sigmoid", selection_bias=True)
    assert route(torch.zeros(1, EXPERTS), rule, bias).ids_TK.tolist() == [[11]]


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "sqrt-softplus"])
def test_scores_that_saturate_in_float32_keep_the_order_of_their_logits(scoring):
    logits = torch.tensor([[30.0, -200.0, 40.0, -150.0, 200.0, 35.0]])
    ids = route(logits, RoutingRule(top_k=6, scoring=scoring, epsilon=1e-20)).ids_TK
    assert ids.tolist() == [[4, 2, 5, 0, 3, 1]]


@rules
def test_nan_logit_stays_with_its_token(rule):
    logits = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(4))
    broken = logits.clone()
    broken[2, 5] = math.nan
    broken[4] = math.nan
    clean, routed = route(logits, rule, bias_for(rule)), route(broken, rule, bias_for(rule))
    assert ((routed.ids_TK >= 0) & (routed.ids_TK < EXPERTS)).all()
    assert routed.weights_TK.isnan().any(-1).tolist() == [False, False, True, False, True, False]
    for token in (0, 1, 3, 5):
        assert torch.equal(routed.ids_TK[token], clean.ids_TK[token])
        assert torch.equal(routed.weights_TK[token], clean.weights_TK[token])


@rules
def test_zero_tokens(rule):
    routed = route(torch.empty(0, EXPERTS), rule, bias_for(rule))
    assert routed.ids_TK.shape == routed.weights_TK.shape == (0, rule.top_k)


@pytest.mark.parametrize(
    ("rule", "named"),
    [
        (RoutingRule(top_k=17), ["top_k", "17", "1 to 16"]),
        (RoutingRule(top_k=0), ["top_k", "1 to 16"]),
        (RoutingRule(top_k=2, groups=3, groups_kept=1), ["groups", "equal groups"]),
        (RoutingRule(top_k=1, groups=16, groups_kept=4), ["at least 2"]),
        (RoutingRule(top_k=2, groups=4, groups_kept=5), ["groups_kept", "1 to 4"]),
        (RoutingRule(top_k=5, groups=4, groups_kept=1), ["top_k", "at most 4"]),
        (RoutingRule(top_k=2, scoring="tanh"), ["scoring", "tanh"]),
        (RoutingRule(top_k=2, scoring="sigmoid", softmax_after_top_k=True), ["softmax_after_top_k"]),
        (RoutingRule(top_k=17, groups=4, groups_kept=5), ["top_k", "groups_kept"]),
    ],
)
def test_rule_that_does_not_fit_is_refused_with_every_reason(rule, named):
    with pytest.raises(UsageError) as caught:
        route(torch.zeros(1, EXPERTS), rule)
    assert all(word in str(caught.value) for word in named)


@pytest.mark.parametrize(
    ("rule", "bias"),
    [
        (RULES["kimi-k2"], None),
        (RULES["kimi-k2"], torch.zeros(EXPERTS, dtype=torch.bfloat16)),
        (RULES["kimi-k2"], torch.zeros(EXPERTS - 1)),
        (RULES["mixtral"], torch.zeros(EXPERTS)),
    ],
)
def test_missing_rounded_misshapen_and_unwanted_selection_bias_are_refused(rule, bias):
    with pytest.raises(UsageError, match="selection bias"):
        route(torch.zeros(1, EXPERTS), rule, bias)
