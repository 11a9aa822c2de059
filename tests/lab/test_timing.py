"""The timer: what a sample says, what a tie is, and that copies of the weights really take turns."""

import json
import statistics
import time
from pathlib import Path

import pytest
import torch

from muster import device
from muster.device import last_level_cache
from muster.formats.spec import BF16, NVFP4
from muster.gemm.problem import LinearProblem
from muster.lab.measure import timing
from muster.lab.measure.peaks import Peaks
from muster.lab.measure.timing import NOISY, TIE, Sample, copies, measure, tie
from muster.lab.prove import isolate
from muster.lab.prove.cases import Case, Part, Role, build
from muster.lab.prove.isolate import Limits
from muster.moe.problem import MoEProblem, RoutingRule

CPU = torch.device("cpu")
EXPERTS = Part(Role.EXPERTS, MoEProblem(64, 64, 8, RoutingRule(2), 8, weights=NVFP4, dtype="f32"), "", 1)
LINEAR = Part(Role.LINEARS, LinearProblem(rows=96, columns=64, weights=BF16, dtype="f32"), "", 1)
PEAKS = Peaks(read_bandwidth=1e12, operations={"f32": 1e13})


def test_a_sample_holds_the_median_and_the_quartiles() -> None:
    sample = Sample.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert sample == Sample(median=3.0, low=2.0, high=4.0, repetitions=5)
    assert sample.spread == pytest.approx(2 / 3)


@pytest.mark.parametrize(("high", "noisy"), [(1.0 + 0.9 * NOISY, False), (1.0 + 1.1 * NOISY, True)])
def test_a_sample_is_noisy_when_its_quartiles_are_far_apart(high: float, noisy: bool) -> None:
    assert Sample(1.0, 1.0, high, 9).noisy is noisy


def test_one_outlier_among_many_repetitions_does_not_move_a_sample() -> None:
    calm = [1.0 + 0.001 * i for i in range(20)]
    assert Sample.of([*calm, 100.0]).median == pytest.approx(statistics.median(calm), rel=0.01)
    assert not Sample.of([*calm, 100.0]).noisy


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (Sample(1.0, 0.999, 1.001, 9), Sample(1.0 + 0.9 * TIE, 1.0295, 1.031, 9), True),
        (Sample(1.0, 0.999, 1.001, 9), Sample(1.0 + 1.1 * TIE, 1.032, 1.034, 9), False),
        (Sample(1.0, 0.9, 1.3, 9), Sample(1.4, 1.25, 1.5, 9), True),
        (Sample(1.0, 0.9, 1.1, 9), Sample(1.4, 1.25, 1.5, 9), False),
    ],
)
def test_a_tie_is_a_small_difference_or_overlapping_quartiles_in_either_order(
    a: Sample, b: Sample, expected: bool
) -> None:
    assert tie(a, b) is expected
    assert tie(b, a) is expected
    assert tie(a, a)


def test_calls_take_turns_and_every_copy_is_used_as_often_as_any_other() -> None:
    used: list[int] = []
    calls = [lambda i=i: (used.append(i), time.sleep(2e-4))[1] for i in range(5)]
    measure({"a": calls}, device=CPU, seconds=0.02)
    assert len(used) > 20
    assert used == [i % 5 for i in range(len(used))]


def test_rounds_go_through_the_backends_in_alternating_order() -> None:
    order: list[str] = []
    calls = {name: [lambda name=name: (order.append(name), time.sleep(2e-3))[1]] for name in ("a", "b", "c")}
    samples = measure(calls, device=CPU, seconds=0.02)
    rounds = sum(sample.repetitions for sample in samples.values())
    assert order[-rounds:] == (["a", "b", "c", "c", "b", "a"] * rounds)[:rounds]
    assert {sample.repetitions for sample in samples.values()} == {rounds // 3}


def test_a_backend_that_has_lost_is_not_timed_for_long() -> None:
    samples = measure({"fast": [lambda: time.sleep(1e-3)], "slow": [lambda: time.sleep(2e-2)]}, device=CPU, seconds=0.1)
    assert samples["slow"].repetitions == 7
    assert samples["fast"].repetitions > 7


def test_a_slow_call_is_measured_by_the_clock() -> None:
    sample = measure({"sleep": [lambda: time.sleep(5e-3)]}, device=CPU, seconds=0.05)["sleep"]
    assert 5e-3 <= sample.median < 2e-2


def test_a_call_much_shorter_than_the_clock_is_timed_many_at_a_time() -> None:
    count = 0

    def call() -> None:
        nonlocal count
        count += 1

    sample = measure({"nothing": [call]}, device=CPU, seconds=0.01)["nothing"]
    assert sample.median < 5e-6
    assert count > 50 * sample.repetitions


@pytest.mark.parametrize(
    ("touched", "cache"), [(1, 32 << 20), (1 << 20, 32 << 20), (3 << 20, 32 << 20), (1 << 30, 32 << 20)]
)
def test_the_other_copies_fill_the_cache_twice_between_two_uses(touched: int, cache: int) -> None:
    assert (copies(touched, cache) - 1) * touched >= 2 * cache
    assert (copies(touched, cache) - 2) * touched < 2 * cache


def test_a_machine_without_a_known_cache_needs_one_copy() -> None:
    assert copies(1 << 20, 0) == 1


@pytest.mark.parametrize("part", [EXPERTS, LINEAR], ids=lambda part: part.role.value)
def test_copies_hold_the_same_numbers_in_memory_of_their_own(part: Part) -> None:
    inputs = build(Case(part, 3, "uniform" if part is EXPERTS else "dense", 0), CPU)
    several = timing._rotation(part, "torch", inputs, wanted=3, memory=1 << 30)
    outs = []
    for candidate in several:
        outs.append(candidate.out_like(3))
        candidate.run(outs[-1], timing.Workspace(CPU))
    assert len(several) == 3
    assert all(torch.equal(out, outs[0]) for out in outs)
    originals = {tensor.data_ptr() for tensor in timing.weight_tensors(inputs)}
    addresses = {tensor.data_ptr() for tensor in timing.weight_tensors(timing.copied(inputs))}
    assert originals
    assert not originals & addresses


def test_no_more_copies_are_made_than_memory_holds() -> None:
    inputs = build(Case(LINEAR, 3, "dense", 0), CPU)
    held = 96 * 64 * 2
    assert len(timing._rotation(LINEAR, "torch", inputs, wanted=100, memory=4 * held)) == 4
    assert len(timing._rotation(LINEAR, "torch", inputs, wanted=100, memory=0)) == 1


def test_a_case_is_timed_with_its_floor_and_enough_copies() -> None:
    with torch.inference_mode():
        (timed,) = timing.time_case(Case(LINEAR, 2, "dense", 0), ["torch"], CPU, PEAKS, seconds=0.01)
    assert timed.backend == "torch"
    assert timed.cold is (timed.copies == copies(96 * 64 * 2, last_level_cache(CPU)))
    assert timed.floor.weight_bytes == 96 * 64 * 2
    assert 0 < timed.floor.share(timed.sample.median) < 1


def test_a_fresh_process_times_cases_in_order_and_writes_each_when_it_is_done(tmp_path: Path) -> None:
    cases = {Case(EXPERTS, 4, "uniform", 0): ["torch", "cpu"], Case(LINEAR, 2, "dense", 0): ["torch"]}
    order = timing.order(cases, device.cpu(), tmp_path, seconds=0.02)
    seen: list[tuple[str, ...]] = []
    with isolate.run(
        "muster.lab.measure.timing:time_in_child",
        json.loads(json.dumps(order)),
        Limits(seconds=60),
        on_result=lambda path, _: seen.append(tuple(timed.backend for timed in timing.read(path))),
    ) as outcome:
        assert outcome.good, outcome.describe()
        first, second = (timing.read(path) for path in sorted(outcome.results.glob("*.json")))
    assert seen == [("torch", "cpu"), ("torch",)]
    assert all(timed.sample.low <= timed.sample.median <= timed.sample.high for timed in (*first, *second))
    assert first[0].floor == first[1].floor
    assert (tmp_path / "peaks.json").exists()
