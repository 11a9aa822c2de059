"""What the judge is worth: every deliberate bug is rejected wherever it applies, every correct backend is accepted."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from muster.device import cpu
from muster.formats.rounding import EXACT, Grid, Rounding
from muster.formats.spec import BF16, F32, FORMATS, FP8_BLOCK, MXFP4, NVFP4, int4
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.candidate import Candidate
from muster.lab.prove.cases import Case, Part, Role, build, cases, decline, reference
from muster.lab.prove.mutants import MUTANTS, Kernel
from muster.lab.prove.patterns import PATTERNS
from muster.lab.prove.tolerance import LIMITS, decide, grade, judge
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.registry import backends
from muster.workspace import Workspace

CPU = torch.device("cpu")
RULE = RoutingRule(2, scaling_factor=2.5)
GPT_OSS = Activation("swiglu-oai", limit=7.0)
BF16_POINTS = Rounding(product=Grid.BF16, inner=Grid.BF16, rows=Grid.BF16)
FP8_POINTS = Rounding(input=Grid.FP8_GROUP, product=Grid.BF16, inner=Grid.FP8_GROUP, weighted=Grid.BF16)
NVFP4_POINTS = Rounding(input=Grid.NVFP4, product=Grid.BF16, inner=Grid.NVFP4, rows=Grid.BF16)


def experts(format, dtype="f32", **changes) -> MoEProblem:
    return replace(MoEProblem(128, 128, 6, RULE, 6, weights=format, dtype=dtype), **changes)


def linear(format, dtype="f32", **changes) -> LinearProblem:
    return replace(LinearProblem(256, 256, format, dtype), **changes)


KERNELS: dict[str, tuple[MoEProblem | LinearProblem, Rounding]] = {
    **{f"experts {name}": (experts(format), EXACT) for name, format in FORMATS.items()},
    **{f"linear {name}": (linear(format, bias=True), EXACT) for name, format in FORMATS.items()},
    "experts int4 act-order": (experts(int4(32), act_order=True), EXACT),
    "linear int4 act-order": (linear(int4(32), act_order=True), EXACT),
    "linear of long rows": (linear(BF16, "bf16", columns=4096), EXACT),
    "experts gpt-oss": (experts(MXFP4, "bf16", activation=GPT_OSS, bias=True), BF16_POINTS),
    "experts gelu, one expert per token": (
        experts(F32, activation=Activation("gelu"), routing=RoutingRule(1, "sigmoid", renormalise=False)),
        EXACT,
    ),
    "experts relu2, weight on input": (
        experts(NVFP4, activation=Activation("relu2"), router_weight_on_input=True),
        EXACT,
    ),
    "experts of one rank": (experts(NVFP4, "bf16", local_experts=2, first_expert=2), BF16_POINTS),
    "experts, all for every token": (experts(NVFP4, "bf16", routing=RoutingRule(6)), BF16_POINTS),
    "experts bf16, bf16": (experts(BF16, "bf16"), BF16_POINTS),
    "experts nvfp4, f16": (experts(NVFP4, "f16"), EXACT),
    "experts int4, bf16": (experts(int4(32), "bf16"), BF16_POINTS),
    "experts fp8-block, fp8 tokens": (experts(FP8_BLOCK, "bf16"), FP8_POINTS),
    "experts nvfp4, nvfp4 tokens": (experts(NVFP4, "bf16"), NVFP4_POINTS),
    "linear nvfp4, nvfp4 tokens": (linear(NVFP4, "bf16"), Rounding(input=Grid.NVFP4)),
}

THOROUGH = ("experts nvfp4", "experts of one rank", "experts bf16, bf16", "experts nvfp4, nvfp4 tokens", "linear nvfp4")
"""Kernels that run on every pattern; the others on those of a quick proof."""


def kernels(name: str) -> Iterator[Kernel]:
    problem, rounding = KERNELS[name]
    role = Role.EXPERTS if isinstance(problem, MoEProblem) else Role.LINEARS
    for case in cases(Part(role, problem, "", 1), (1, 18), None, quick=name not in THOROUGH):
        yield Kernel(case, build(case, CPU), rounding)


@pytest.fixture(scope="module")
def applied():
    """Names of the mutants that some case of some kernel showed."""
    return set()


@pytest.mark.parametrize("name", KERNELS)
def test_every_mutant_is_rejected_on_every_case_and_the_kernel_without_a_bug_is_not(name, applied):
    survivors = []
    for kernel in kernels(name):
        computed = reference(kernel.case, kernel.inputs, kernel.rounding)
        ideal = reference(kernel.case, kernel.inputs)
        limit = LIMITS[grade(kernel.rounding, KERNELS[name][0].dtype)].of(kernel.case.tokens)
        assert decide(kernel.answer(), computed, ideal, limit)[0] is Verdict.PROVEN
        for mutant in MUTANTS:
            if not mutant.applies(kernel):
                continue
            applied.add(mutant.name)
            verdict, errors = decide(mutant.compute(kernel), computed, ideal, limit)
            if verdict is Verdict.PROVEN:
                survivors.append((mutant.name, kernel.case.pattern, kernel.case.tokens, errors))
    assert not survivors


def test_every_mutant_applies_somewhere(applied):
    if not applied:
        pytest.skip("needs the tests before it")
    assert applied == {mutant.name for mutant in MUTANTS}
    assert len(MUTANTS) >= 25


def small(format, dtype="f32") -> MoEProblem:
    return MoEProblem(64, 64, 4, RULE, 4, weights=format, dtype=dtype)


SMALL = (
    *(small(format) for format in (BF16, NVFP4, MXFP4, FP8_BLOCK, int4(32))),
    small(NVFP4, "bf16"),
    small(BF16, "f16"),
    *(LinearProblem(48, 64, format) for format in (BF16, NVFP4, int4(32))),
)


@pytest.mark.parametrize("problem", SMALL, ids=lambda problem: Part(Role.EXPERTS, problem, "", 1).key)
def test_correct_backends_are_accepted_on_200_seeds(problem):
    role = Role.EXPERTS if isinstance(problem, MoEProblem) else Role.LINEARS
    names = backends().names() if role is Role.EXPERTS else linears().names()
    patterns = tuple(PATTERNS) if role is Role.EXPERTS else ("dense", "blank")
    rejected, judged = [], 0
    for seed in range(200):
        case = Case(Part(role, problem, "", 1), 1 + seed % 5 * 4, patterns[seed % len(patterns)], seed)
        inputs = build(case, CPU)
        for name in names:
            if decline(name, case, cpu()) is not None:
                continue
            candidate = Candidate.bind(case.part, name, inputs)
            out = candidate.out_like(case.tokens)
            candidate.run(out, Workspace())
            verdict, errors = judge(out, case, inputs, name)
            judged += 1
            if verdict is not Verdict.PROVEN:
                rejected.append((name, case.pattern, seed, errors))
    assert judged >= 200
    assert not rejected
