"""Every registered backend on the same named cases; a new backend needs no new test file."""

import math
from dataclasses import replace

import pytest
import torch

from muster import device
from muster.formats.spec import F32, FORMATS, NVFP4
from muster.lab.prove.tolerance import LIMITS, rms
from muster.moe.backend import FusedFunc, Routed
from muster.moe.problem import Activation
from muster.moe.registry import backends
from muster.workspace import Workspace

from .cases import CASES, Case, nothing_here, problem, sentinels
from .trial import alone, decline, run

BACKENDS = backends().names()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


@pytest.fixture
def trial(backend, case):
    """The runs; skipped when the backend declines the case, which must be with reasons."""
    return run_or_skip(backend, case)


def run_or_skip(backend, case):
    answer = decline(backend, case)
    if answer is not None:
        assert answer.reasons
        assert all(answer.reasons)
        pytest.skip(f"declined: {answer}")
    return run(backend, case)


def accepted(out_TD, truth_TD, dtype="f32"):
    whole, worst = rms(out_TD, truth_TD.to(out_TD.dtype))
    limit = LIMITS[dtype].of(len(out_TD))
    return whole <= limit.whole and worst <= limit.worst_token


def test_output_agrees_with_the_float64_reference(trial, case):
    errors = [rms(out, trial.truth_TD) for out in trial.outs]
    assert all(accepted(out, trial.truth_TD, case.problem.dtype) for out in trial.outs), errors


def test_whole_output_is_written_and_nothing_beside_it(trial):
    assert trial.unwritten == 0
    assert trial.guards_hurt == 0


def test_inputs_and_weights_are_left_alone(trial):
    assert trial.inputs_changed == ()


def test_warm_run_takes_no_new_workspace(trial):
    assert trial.grown == 0


def test_declared_determinism_is_bitwise(trial, backend):
    if not backends().get(backend).facts.deterministic:
        pytest.skip("declares no determinism")
    first, *others = trial.outs
    assert all(torch.equal(first, other) for other in others)


def test_token_alone_gets_its_row_of_the_batch(trial, case):
    tokens = len(trial.outs[0])
    for token in {0, tokens // 2, tokens - 1} if tokens > 1 else ():
        limit = LIMITS[case.problem.dtype].worst_token * float(trial.truth_TD.square().mean().sqrt())
        error = alone(trial, token)[0].double() - trial.outs[0][token].double()
        assert float(error.square().mean().sqrt()) <= limit


@pytest.mark.parametrize("poisoned", ["token", "routing weight"])
@pytest.mark.parametrize("name", ["sentinel ids, nvfp4", "sentinel ids", "format f32", "every expert active"])
def test_nan_of_one_token_reaches_no_other(backend, name, poisoned):
    trial = run_or_skip(backend, CASES[name])
    x_TD, weights_TK = trial.inputs.x_TD.clone(), trial.inputs.routed.weights_TK.clone()
    victim = 2
    (x_TD if poisoned == "token" else weights_TK)[victim] = math.nan
    out_TD = torch.full_like(x_TD, math.nan)
    trial.experts.run(x_TD, Routed(trial.inputs.routed.ids_TK, weights_TK), out_TD, Workspace())
    others = [token for token in range(len(x_TD)) if token != victim]
    assert out_TD[victim].isnan().any()
    assert accepted(out_TD[others], trial.truth_TD[others])


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
def test_smallest_shape_that_the_declared_alignment_allows(backend, format):
    facts = backends().get(backend).facts
    unit = format.block[1] if format.element.bits == 4 else 1
    hidden, inner = math.lcm(unit, facts.hidden_multiple), math.lcm(unit, facts.inner_multiple)
    trial = run_or_skip(backend, Case(problem(hidden, inner, experts=3, weights=format), tokens=4))
    assert accepted(trial.outs[0], trial.truth_TD)


def test_every_declared_fact_is_exercised_by_a_case(backend):
    facts = backends().get(backend).facts
    if "cpu" not in facts.devices:
        pytest.skip("no such device here")
    ran = [entry for entry in CASES.values() if decline(backend, entry) is None]
    problems = [entry.problem for entry in ran]
    assert {p.weights.family for p in problems} == facts.weights
    assert {p.activation.name for p in problems} == facts.activations
    assert {p.dtype for p in problems} == facts.dtypes
    assert any(p.act_order for p in problems) == facts.act_order
    assert any(p.bias for p in problems) == facts.bias
    assert any(p.activation.limit is not None for p in problems) == facts.clamp
    assert any(p.router_weight_on_input for p in problems) == facts.router_weight_on_input
    assert any(entry.tokens == 0 for entry in ran) == facts.zero_tokens
    assert any(entry.pattern in (sentinels, nothing_here) for entry in ran) == facts.sentinel_ids
    assert any(p.local_experts < p.experts for p in problems) == facts.sentinel_ids


def test_decline_names_every_reason_at_once(backend):
    facts = backends().get(backend).facts
    hostile = problem(hidden=97, inner=89, weights=replace(F32, name="f7"), activation=Activation("tanh", 1.0))
    answer = (
        backends()
        .get(backend)
        .supports(replace(hostile, dtype="f64", bias=True, act_order=True), replace(device.cpu(), key="3.5"))
    )
    expected = ["3.5", "f7", "tanh", "f64"]
    expected += ["act-order"] if not facts.act_order else []
    expected += ["biases"] if not facts.bias else []
    expected += ["limit"] if not facts.clamp else []
    expected += ["hidden"] if facts.hidden_multiple > 1 else []
    expected += ["inner"] if facts.inner_multiple > 1 else []
    assert len(answer.reasons) >= len(expected)
    assert all(word in str(answer) for word in expected)


def test_fused_function_says_how_many_tokens_it_is_meant_for(backend):
    entry = backends().get(backend)
    if not isinstance(entry, FusedFunc) or entry.facts.max_tokens is None:
        pytest.skip("any number")
    trial = run_or_skip(backend, Case(problem(weights=NVFP4), tokens=entry.facts.max_tokens))
    assert len(trial.outs[0]) == entry.facts.max_tokens
