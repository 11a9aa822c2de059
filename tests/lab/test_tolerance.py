"""The judge's arithmetic, its references, and where its limits come from."""

import json
from collections import defaultdict
from pathlib import Path

import pytest
import torch

from muster.formats.codec import decode, encode
from muster.formats.rounding import EXACT, Grid, Rounding, round_to, round_weights
from muster.formats.spec import BF16, FP8_BLOCK, NVFP4, int4
from muster.gemm.problem import LinearProblem
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.cases import Case, Part, Role, build, reference
from muster.lab.prove.tolerance import LIMITS, decide, grade, judge, rms, rounding_of, weigh
from muster.moe.problem import MoEProblem, RoutingRule

CPU = torch.device("cpu")
RECORDS = Path(__file__).parents[2] / "results" / "limits.jsonl"


def case(dtype="bf16", pattern="uniform", tokens=9, **changes) -> Case:
    problem = MoEProblem(128, 64, 4, RoutingRule(2), 4, weights=NVFP4, dtype=dtype, **changes)
    return Case(Part(Role.EXPERTS, problem, "", 1), tokens, pattern, 0)


def test_limits_are_three_times_what_correct_kernels_were_measured_to_show():
    worst = defaultdict(lambda: [0.0, 0.0])
    for line in RECORDS.read_text().splitlines():
        record = json.loads(line)
        for place, number in enumerate(("whole", "worst_token")):
            worst[record["grade"]][place] = max(worst[record["grade"]][place], record[number]["worst"])
    assert worst.keys() == LIMITS.keys()
    for name, limit in LIMITS.items():
        assert 3 * worst[name][0] <= limit.whole <= 3.5 * worst[name][0], (name, worst[name])
        assert 3 * worst[name][1] <= limit.worst_token <= 3.5 * worst[name][1], (name, worst[name])


def test_an_error_everywhere_counts_in_the_whole_and_one_token_in_the_worst():
    truth = torch.randn(100, 64, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert rms(truth * 1.02, truth) == pytest.approx((0.02, 0.02), rel=0.1)
    one = truth.clone()
    one[7] *= 1.5
    whole, worst = rms(one, truth)
    assert whole == pytest.approx(0.05, rel=0.2)
    assert worst == pytest.approx(0.5, rel=0.1)


def test_a_token_is_measured_against_its_own_size_or_the_typical_one_whichever_is_larger():
    truth = torch.ones(9, 16, dtype=torch.float64)
    truth[3], truth[4], truth[5] = 0.0, 1e-9, 1e4
    found = truth.clone()
    found[3:5] += 1e-3
    found[5] *= 1.001
    assert rms(found, truth)[1] == pytest.approx(1e-3)
    found[3] += 1.0
    assert rms(found, truth)[1] == pytest.approx(1.001)


def test_where_everything_must_be_nought_anything_else_is_wrong():
    truth = torch.zeros(3, 8, dtype=torch.float64)
    assert rms(torch.zeros(3, 8), truth) == (0.0, 0.0)
    found = torch.zeros(3, 8)
    found[1, 2] = 1e-30
    assert min(rms(found, truth)) > 1e6
    assert rms(torch.zeros(0, 8), truth[:0]) == (0.0, 0.0)


def test_nan_and_infinity_are_nan_unless_the_reference_has_them():
    limit = LIMITS["f32"]
    truth = torch.ones(2, 4, dtype=torch.float64)
    for bad in (torch.nan, torch.inf):
        found = truth.float()
        found[1, 2] = bad
        assert decide(found, truth, truth, limit)[0] is Verdict.NAN
    truth[0, 0] = 1e39
    assert decide(truth.float(), truth, truth, limit)[0] is Verdict.PROVEN
    assert decide(-truth.float(), truth, truth, limit)[0] is Verdict.WRONG


def test_a_kernel_that_quantises_tokens_is_right_by_its_own_reference_and_its_distance_from_the_ideal_is_told():
    one = case()
    inputs, rounding = build(one, CPU), Rounding(input=Grid.NVFP4, inner=Grid.NVFP4)
    found = reference(one, inputs, rounding).bfloat16()
    verdict, errors = weigh(found, one, inputs, rounding)
    assert verdict is Verdict.PROVEN
    assert errors.whole == errors.worst_token == 0.0
    assert 0.05 < errors.ideal_whole < 0.3
    assert weigh(found, one, inputs, EXACT)[0] is Verdict.WRONG


@pytest.mark.parametrize("point", ["input", "product", "inner", "rows", "weighted"])
def test_a_rounding_point_that_is_not_declared_is_found_out(point):
    one = case(dtype="f32")
    inputs, rounding = build(one, CPU), Rounding(**{point: Grid.BF16})
    found = reference(one, inputs, rounding).float()
    assert weigh(found, one, inputs, rounding)[0] is Verdict.PROVEN
    assert weigh(found, one, inputs, EXACT)[0] is Verdict.WRONG


def test_rows_of_a_runner_core_pass_through_the_dtype_of_the_tokens():
    assert rounding_of("torch", case("f32").part.problem) == EXACT
    assert rounding_of("torch", case("bf16").part.problem) == Rounding(rows=Grid.BF16)
    on_input = rounding_of("torch", case("f16", router_weight_on_input=True).part.problem)
    assert on_input == Rounding(input=Grid.F16, rows=Grid.F16)


def test_the_coarsest_grid_decides_the_limit():
    assert grade(EXACT, "f32") == "f32"
    assert grade(Rounding(inner=Grid.BF16), "f32") == "bf16"
    assert grade(Rounding(input=Grid.FP8_GROUP, product=Grid.BF16), "bf16") == "fp8"
    assert grade(Rounding(input=Grid.FP8_GROUP, inner=Grid.NVFP4), "bf16") == "nvfp4"


@pytest.mark.parametrize("name", LIMITS)
def test_two_per_cent_everywhere_are_never_within_a_limit(name):
    for tokens in (0, 1, 2, 15, 16, 4096):
        limit = LIMITS[name].of(tokens)
        assert LIMITS[name].whole <= limit.whole < 0.02
        assert limit.worst_token == LIMITS[name].worst_token


def test_a_linear_is_judged_like_an_expert_layer():
    problem = LinearProblem(48, 64, int4(32), bias=True)
    one = Case(Part(Role.LINEARS, problem, "", 1), 5, "blank", 0)
    inputs = build(one, CPU)
    right = (inputs.x_TK @ decode(inputs.matrix).T + inputs.bias).float()
    assert judge(right, one, inputs, "torch")[0] is Verdict.PROVEN
    assert judge(right - inputs.bias, one, inputs, "torch")[0] is Verdict.WRONG


GRIDS = {Grid.BF16: 2e-3, Grid.F16: 3e-4, Grid.FP8_TENSOR: 0.04, Grid.FP8_TOKEN: 0.04, Grid.FP8_GROUP: 0.04}
GRIDS |= {Grid.MXFP8: 0.04, Grid.NVFP4: 0.13}


@pytest.mark.parametrize("grid", GRIDS)
def test_rounding_is_as_coarse_as_its_grid_and_happens_once(grid):
    values = torch.randn(7, 200, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    values[3] = 0.0
    rounded = round_to(values, grid, torch.tensor(4.0 / 448 if grid is Grid.FP8_TENSOR else 4.0 / 448 / 6))
    error = float((rounded - values).norm() / values.norm())
    assert GRIDS[grid] / 4 < error < GRIDS[grid]
    assert rounded.dtype == torch.float64
    assert not rounded[3].any()
    if grid not in (Grid.FP8_TOKEN, Grid.FP8_GROUP):
        again = round_to(rounded, grid, torch.tensor(4.0 / 448 if grid is Grid.FP8_TENSOR else 4.0 / 448 / 6))
        torch.testing.assert_close(again, rounded, rtol=1e-6, atol=0)


def test_a_token_is_rounded_the_same_alone():
    values = torch.randn(5, 256, generator=torch.Generator().manual_seed(1))
    values[2] *= 100
    for grid in GRIDS:
        assert torch.equal(round_to(values[1:2], grid), round_to(values, grid)[1:2]), grid


@pytest.mark.parametrize("format", [BF16, NVFP4, FP8_BLOCK, int4(32)], ids=lambda format: format.name)
def test_weights_are_rounded_before_the_tensor_scale(format):
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(2))
    matrix = encode(weight, format, 2 if format is NVFP4 else 1)
    exact = decode(matrix, torch.float64)
    assert torch.equal(round_weights(matrix, Grid.NONE), exact)
    rounded = round_weights(matrix, Grid.BF16)
    error = float((rounded - exact).norm() / exact.norm())
    # Four-bit codes times their block scale are bf16 numbers already.
    assert error < 1e-7 if format in (BF16, NVFP4) else 1e-4 < error < 3e-3
