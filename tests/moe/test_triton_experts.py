"""The Triton backends without a GPU: the interpreter's answers, and deliberate bugs."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

from muster.moe.registry import backends

from .cases import nothing_here, sentinels
from .triton_interpreted import CASES, GIVEN, declined

ROOT = Path(__file__).parents[2]


def interpreted(program):
    """The lines that a program of this folder prints on the interpreter."""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-m", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_interpreted_kernels_agree_with_the_reference_and_touch_nothing_else():
    found = interpreted("tests.moe.triton_interpreted")
    assert [(backend, name) for backend, name, _ in found] == [(one, name) for one in GIVEN for name in GIVEN[one]]
    for backend, name, facts in found:
        assert all(value is True for key, value in facts.items() if key != "errors"), (backend, name, facts)


@pytest.mark.parametrize("backend", ["triton_fused", "triton_w8a8"])
def test_every_declared_fact_is_interpreted(backend):
    facts = backends().get(backend).facts
    ran = [CASES[name] for name in GIVEN[backend]]
    assert all(declined(backend, case) is None for case in ran)
    problems = [case.problem for case in ran]
    assert {problem.weights.family for problem in problems} == facts.weights
    assert {problem.activation.name for problem in problems} == facts.activations
    assert facts.bias
    assert any(problem.bias for problem in problems)
    assert facts.clamp
    assert any(problem.activation.limit is not None for problem in problems)
    assert facts.router_weight_on_input
    assert any(problem.router_weight_on_input for problem in problems)
    assert facts.zero_tokens
    assert any(case.tokens == 0 for case in ran)
    assert facts.sentinel_ids
    assert {sentinels, nothing_here} <= {case.pattern for case in ran}
    assert any(problem.local_experts < problem.experts for problem in problems)


def test_every_deliberate_bug_is_rejected_and_the_kernels_as_they_are_proven():
    found = interpreted("tests.moe.gpu_mutants")
    assert len(found) > 10
    for _, bug, accepted in found:
        assert accepted == bug.startswith("as it is"), bug
