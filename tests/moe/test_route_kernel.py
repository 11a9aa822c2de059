"""The routing kernel against the reference router."""

import math

import pytest
import torch

from muster.moe.kernels.route import route, routes
from muster.moe.problem import RoutingRule
from muster.moe.routing import route as reference

RULES = {
    "mixtral": RoutingRule(2),
    "all": RoutingRule(8),
    "olmoe": RoutingRule(8, renormalise=False),
    "gpt-oss": RoutingRule(4, softmax_after_top_k=True),
    "scaled": RoutingRule(3, scaling_factor=2.5, epsilon=1e-6),
}


@pytest.mark.parametrize("experts", [8, 64, 128])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ids_are_the_references_and_weights_within_rounding(rule: RoutingRule, experts: int) -> None:
    assert routes(rule, experts)
    logits_TE = 3 * torch.randn(300, experts, generator=torch.Generator().manual_seed(experts))
    got, wanted = route(logits_TE, rule), reference(logits_TE, rule)
    assert torch.equal(got.ids_TK, wanted.ids_TK)
    assert ((got.weights_TK - wanted.weights_TK).abs() <= 1e-6 * wanted.weights_TK).all()


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_ties_extremes_and_nan_are_ranked_as_the_reference_ranks_them(rule: RoutingRule) -> None:
    logits_TE = torch.zeros(6, 8)
    logits_TE[1] = torch.tensor([1.0, 2.0, 2.0, 1.0, 2.0, 1.0, 0.0, 2.0])
    logits_TE[2] = -0.0
    logits_TE[2, 5] = 0.0
    logits_TE[3] = torch.tensor([88.0, -88.0, 200.0, 200.0, -300.0, 1e-30, -1e-30, 0.0])
    logits_TE[4, 3] = -math.inf
    logits_TE[5, 6] = math.nan
    logits_TE[5, 2] = -math.nan
    got, wanted = route(logits_TE, rule), reference(logits_TE, rule)
    assert torch.equal(got.ids_TK, wanted.ids_TK)
    torch.testing.assert_close(got.weights_TK, wanted.weights_TK, rtol=1e-6, atol=1e-30, equal_nan=True)


def test_no_token_is_routed_to_nothing() -> None:
    routed = route(torch.empty(0, 8), RoutingRule(2))
    assert routed.ids_TK.shape == routed.weights_TK.shape == (0, 2)


@pytest.mark.parametrize(
    ("rule", "experts"),
    [
        (RoutingRule(2, scoring="sigmoid"), 8),
        (RoutingRule(2, selection_bias=True), 8),
        (RoutingRule(2, groups=2), 8),
        (RoutingRule(2), 12),
    ],
)
def test_other_rules_are_left_to_the_reference(rule: RoutingRule, experts: int) -> None:
    assert not routes(rule, experts)
