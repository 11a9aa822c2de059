import math
from collections.abc import Callable

import pytest
import torch

from muster.native import mathematics, team
from muster.native.jit import F32, I32, I64, LANES, PORTABLE, Emitter, F32x8, Target, Value, host

TARGETS = pytest.mark.parametrize("target", [host(), PORTABLE], ids=["host", "portable"])


def apply(function: Callable[[Emitter, Value], Value], x: torch.Tensor, target: Target) -> torch.Tensor:
    e = Emitter("apply", target)
    source, result = e.argument(0), e.argument(1)
    with e.loop(0, x.numel() * 4, 4 * LANES) as place:
        e.store(function(e, e.load(F32x8, source + place)), result + place)
    out = torch.full_like(x, math.nan)
    e.compile()(x.data_ptr(), out.data_ptr())
    return out


@TARGETS
def test_exp_is_within_two_units_in_the_last_place(target: Target) -> None:
    x = torch.linspace(-87, 87, 8 * 5000)
    exact = x.double().exp()
    unit = exact * 2.0**-23
    assert ((apply(mathematics.exp, x, target).double() - exact).abs() <= 2 * unit).all()


@TARGETS
def test_exp_beyond_its_range_is_finite_and_not_nought(target: Target) -> None:
    x = torch.tensor([-math.inf, -1e30, -88.0, 88.0, 1e30, math.inf, 0.0, -0.0])
    y = apply(mathematics.exp, x, target)
    assert y.isfinite().all()
    assert (y > 0).all()
    assert y[6] == y[7] == 1


@TARGETS
def test_exp_and_sigmoid_of_nan_are_nan(target: Target) -> None:
    x = torch.full((8,), math.nan)
    assert apply(mathematics.exp, x, target).isnan().all()
    assert apply(mathematics.sigmoid, x, target).isnan().all()


@TARGETS
def test_maximum_and_minimum_keep_a_nan_of_their_first_argument(target: Target) -> None:
    x = torch.tensor([math.nan, 1.0, -1.0, 0.0] * 2)
    assert apply(lambda e, v: e.maximum(v, 0.0), x, target)[:3].tolist()[1:] == [1.0, 0.0]
    assert apply(lambda e, v: e.maximum(v, 0.0), x, target)[0].isnan()
    assert apply(lambda e, v: e.minimum(v, 0.0), x, target)[0].isnan()


def test_strips_cover_every_index_once_the_widest_first() -> None:
    e = Emitter("strips", host())
    stop, seen = e.argument(0), e.argument(1)

    def mark(first: Value, width: int) -> None:
        for i in range(width):
            at = seen + (first + i) * 4
            e.store(e.load(I32, at) + (100 * width + 1), at)

    e.strips(e.constant(I64, 0), stop, (4, 2, 1), mark)
    kernel = e.compile()
    for count in range(12):
        marks = torch.zeros(16, dtype=torch.int32)
        kernel(count, marks.data_ptr())
        widths = [4] * (count // 4 * 4) + [2] * (count % 4 // 2 * 2) + [1] * (count % 2)
        assert marks.tolist() == [100 * width + 1 for width in widths] + [0] * (16 - count)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_team_calls_the_kernel_once_on_every_thread(threads: int) -> None:
    e = Emitter("team", host())
    number, total = team.member(e)
    marks = e.argument(team.RESERVED)
    at = marks + number * 8
    e.store(e.load(I64, at) + 1, at)
    team.barrier(e, total)
    with e.when(number.compare("==", 0)):
        e.store(total, marks, 8 * 7)
    kernel = e.compile()

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        seen = torch.zeros(8, dtype=torch.int64)
        team.team().run(kernel, (seen.data_ptr(),))
        assert seen.tolist() == [1] * threads + [0] * (7 - threads) + [threads]
        seen.zero_()
        team.team().run(kernel, (seen.data_ptr(),), alone=True)
        assert seen.tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    finally:
        torch.set_num_threads(before)


def test_values_of_different_types_do_not_mix() -> None:
    e = Emitter("mixed", host())
    with pytest.raises(AssertionError, match="i64"):
        e.constant(I64, 1) + e.constant(F32, 1)
