"""The layer: the planned backend really runs, on the routing of the reference router."""

import math
from dataclasses import replace

import pytest
import torch

from muster import device
from muster.errors import UsageError
from muster.formats.spec import NVFP4
from muster.lab.prove.tolerance import rms
from muster.moe.layer import Gate, MoELayer
from muster.moe.problem import RoutingRule
from muster.moe.reference import moe_layer
from muster.moe.registry import backends
from muster.plan import Choice, PlanEntry, by_facts
from muster.workspace import Workspace

from .cases import Case, build, problem

RULE = RoutingRule(3, "sigmoid", selection_bias=True, scaling_factor=2.5, epsilon=1e-20)
PROBLEM = replace(problem(weights=NVFP4, experts=8), routing=RULE)
INPUTS = build(Case(PROBLEM, tokens=40), 40)


def gate() -> Gate:
    generator = torch.Generator().manual_seed(4)
    return Gate(
        torch.randn(8, 128, generator=generator).bfloat16() / 8,
        torch.randn(8, generator=generator),
        torch.randn(8, generator=generator) * 0.1,
    )


def choice(requested: str | None = None) -> Choice:
    return by_facts(backends(), PROBLEM, device.cpu(), requested, kind="expert-layer")


def layer(plan: Choice, **options) -> MoELayer:
    return MoELayer(PROBLEM, gate(), INPUTS.weights, plan, device.cpu(), **options)


HERE = [name for name, backend in backends() if backend.supports(PROBLEM, device.cpu()) is None]


@pytest.mark.parametrize("requested", [None, *HERE])
def test_layer_equals_the_reference_for_every_backend_and_token_count(requested):
    moe = layer(choice(requested))
    truth_TD = moe_layer(PROBLEM, gate(), INPUTS.weights, INPUTS.x_TD)
    for tokens in (1, 2, 7, 40):
        assert max(rms(moe(INPUTS.x_TD[:tokens]), truth_TD[:tokens])) < 1e-5


def test_backends_used_names_what_ran_and_nothing_before():
    plan = choice()
    moe = layer(plan)
    assert moe.backends_used == ()
    moe(INPUTS.x_TD[:40])
    assert moe.backends_used == (plan.backend_for(40),)
    moe(INPUTS.x_TD[:1])
    assert set(moe.backends_used) == {plan.backend_for(40), plan.backend_for(1)}


def test_shared_expert_is_added_once():
    plan = choice()
    alone, both = layer(plan)(INPUTS.x_TD), layer(plan, shared=lambda x_TD: x_TD * 2)(INPUTS.x_TD)
    assert torch.equal(both, alone + INPUTS.x_TD * 2)


def test_zero_tokens_run_no_backend():
    moe = layer(choice())
    assert moe(INPUTS.x_TD[:0]).shape == (0, 128)
    assert moe.backends_used == ()


def test_output_is_fresh_and_input_untouched():
    moe, x_TD = layer(choice()), INPUTS.x_TD.clone()
    first = moe(x_TD)
    kept = first.clone()
    moe(x_TD * 3)
    assert torch.equal(first, kept)
    assert torch.equal(x_TD, INPUTS.x_TD)


@pytest.mark.parametrize("tokens", [1, 9, 40])
def test_input_that_is_a_strided_view_gives_the_same(tokens):
    moe, x_TD = layer(choice()), INPUTS.x_TD[:tokens]
    assert torch.equal(moe(torch.cat([x_TD, x_TD], dim=1)[:, :128]), moe(x_TD))


def test_layers_share_a_workspace():
    plan, workspace = choice(), Workspace()
    one, two = layer(plan, workspace=workspace), layer(plan, workspace=workspace)
    expected = layer(plan)(INPUTS.x_TD)
    one(INPUTS.x_TD)
    buffers = {buffer.data_ptr() for buffer in workspace.buffers}
    assert torch.equal(two(INPUTS.x_TD), expected)
    assert {buffer.data_ptr() for buffer in workspace.buffers} == buffers


def test_nbytes_counts_the_gate_in_float32_and_the_experts_as_stored():
    plan = Choice((PlanEntry(None, "torch", "asked for"),), ())
    weights = INPUTS.weights
    stored = sum(t.nbytes for m in (weights.gate_up, weights.down) for t in m.tensors.values())
    assert layer(plan).nbytes == stored + 8 * 128 * 4 + 8 * 4 + 8 * 4


def test_nan_of_one_token_stays_with_it():
    moe, x_TD = layer(choice()), INPUTS.x_TD.clone()
    clean = moe(x_TD)
    x_TD[3, 7] = math.nan
    broken = moe(x_TD)
    others = [token for token in range(40) if token != 3]
    assert broken[3].isnan().any()
    assert max(rms(broken[others], clean[others])) < 1e-6


def test_rule_that_does_not_fit_the_gate_is_refused_when_the_layer_is_built():
    rounded = replace(gate(), selection_bias_E=torch.zeros(8, dtype=torch.bfloat16))
    with pytest.raises(UsageError, match="selection bias"):
        MoELayer(PROBLEM, rounded, INPUTS.weights, choice(), device.cpu())
