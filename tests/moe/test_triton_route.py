"""The GPU's router against the reference router, all rules. Without a GPU see test_triton_interpreter."""

import math
import os

import pytest
import torch

from muster.moe.problem import RoutingRule
from muster.moe.routing import route as reference

from .test_routing import EXPERTS, RULES, bias_for

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="see tests/test_triton_interpreter.py"
)
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def both(logits_TE: torch.Tensor, rule: RoutingRule, bias_E: torch.Tensor | None = None):
    from muster.moe.kernels.triton_route import route

    bias = None if bias_E is None else bias_E.to(DEVICE)
    got = route(logits_TE.to(DEVICE), rule, bias)
    again = route(logits_TE.to(DEVICE), rule, bias)
    assert torch.equal(got.ids_TK, again.ids_TK)
    assert torch.equal(got.weights_TK.view(torch.int32), again.weights_TK.view(torch.int32))
    return got, reference(logits_TE, rule, bias_E)


@rules
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ids_are_the_references_and_weights_within_rounding(rule, dtype) -> None:
    logits_TE = (3 * torch.randn(12, EXPERTS, generator=torch.Generator().manual_seed(1))).to(dtype)
    got, wanted = both(logits_TE, rule, bias_for(rule))
    assert got.ids_TK.dtype is torch.int64
    assert got.weights_TK.dtype is torch.float32
    assert torch.equal(got.ids_TK.cpu(), wanted.ids_TK)
    assert ((got.weights_TK.cpu() - wanted.weights_TK).abs() <= 1e-6 * wanted.weights_TK).all()


@rules
def test_ties_extremes_and_nan_are_ranked_as_the_reference_ranks_them(rule) -> None:
    logits_TE = torch.zeros(9, EXPERTS)
    logits_TE[1, 5] = math.nan
    logits_TE[2] = math.nan
    logits_TE[3, 2] = -math.inf
    logits_TE[4] = 30.0 + torch.arange(EXPERTS)
    logits_TE[5] = -0.0
    logits_TE[5, 3] = 0.0
    logits_TE[6, :8] = 1.0
    logits_TE[7, 1::2] = -80.0
    logits_TE[8, 9], logits_TE[8, 3] = -math.nan, math.nan
    got, wanted = both(logits_TE, rule, bias_for(rule))
    assert torch.equal(got.ids_TK.cpu(), wanted.ids_TK)
    torch.testing.assert_close(got.weights_TK.cpu(), wanted.weights_TK, rtol=2e-6, atol=1e-30, equal_nan=True)


@pytest.mark.parametrize(
    ("experts", "rule"),
    [
        (128, RoutingRule(8)),
        (160, RoutingRule(6, scoring="sigmoid", groups=8, groups_kept=3, epsilon=1e-20, scaling_factor=16.0)),
        (256, RULES["deepseek-v3"]),
        (60, RoutingRule(4, renormalise=False)),
        (512, RoutingRule(10)),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_expert_counts_of_real_models(experts, rule) -> None:
    generator = torch.Generator().manual_seed(7)
    logits_TE = 2 * torch.randn(6, experts, generator=generator)
    bias_E = 0.1 * torch.randn(experts, generator=generator) if rule.selection_bias else None
    got, wanted = both(logits_TE, rule, bias_E)
    assert torch.equal(got.ids_TK.cpu(), wanted.ids_TK)
    assert ((got.weights_TK.cpu() - wanted.weights_TK).abs() <= 1e-6 * wanted.weights_TK).all()


def test_no_token_is_routed_to_nothing() -> None:
    got, _ = both(torch.empty(0, EXPERTS), RoutingRule(2))
    assert got.ids_TK.shape == got.weights_TK.shape == (0, 2)
