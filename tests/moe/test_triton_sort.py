"""The GPU's rows: each once in every layout, and home again. Without a GPU see test_triton_interpreter."""

import math
import os

import pytest
import torch

from muster.moe.backend import Routed, RowLayout
from muster.moe.dispatchers.standard import StandardDispatcher
from muster.moe.dispatchers.triton import TritonDispatcher
from muster.moe.problem import MoEProblem, RoutingRule
from muster.workspace import Workspace

HIDDEN, EXPERTS, FIRST, LOCAL, BLOCK, TOP_K = 20, 9, 2, 4, 8, 3
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
pytestmark = pytest.mark.skipif(
    DEVICE.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1", reason="see tests/test_triton_interpreter.py"
)
layouts = pytest.mark.parametrize("layout", RowLayout)


def problem(dtype="f32", on_input=False) -> MoEProblem:
    return MoEProblem(
        HIDDEN, 3, EXPERTS, RoutingRule(TOP_K), LOCAL, FIRST, dtype=dtype, router_weight_on_input=on_input
    )


def stale(rows: int = 4000) -> Workspace:
    """A workspace whose buffers hold NaN and enormous numbers from earlier use."""
    workspace = Workspace(DEVICE)
    workspace.take("dispatch rows", (rows * HIDDEN,), torch.float32).fill_(math.nan)
    workspace.take("dispatch rows", (rows * HIDDEN,), torch.bfloat16).fill_(math.nan)
    for name, dtype in (("row counts", torch.int64), ("row starts", torch.int64), ("slot rows", torch.int64)):
        workspace.take(name, (rows,), dtype).fill_(torch.iinfo(dtype).max)
    workspace.take("row ranks", (rows,), torch.int32).fill_(torch.iinfo(torch.int32).max)
    return workspace


def drawn(tokens: int, seed: int, low: int = -2, high: int = EXPERTS + 2) -> Routed:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(low, high, (tokens, TOP_K), generator=generator)
    return Routed(ids.to(DEVICE), (torch.rand(tokens, TOP_K, generator=generator) + 0.5).to(DEVICE))


def tokens(count: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return (torch.arange(1.0, count + 1)[:, None] + torch.arange(HIDDEN) / 32).to(DEVICE, dtype)


ROUTINGS = {
    "one": drawn(1, 0),
    "few": drawn(7, 1),
    "many": drawn(60, 2),
    "all the same": drawn(20, 3, FIRST + 1, FIRST + 2),
    "all elsewhere": drawn(5, 4, FIRST + LOCAL, EXPERTS),
    "none": drawn(0, 5),
}
routings = pytest.mark.parametrize("routed", ROUTINGS.values(), ids=ROUTINGS)


@layouts
@routings
@pytest.mark.parametrize("on_input", [False, True], ids=["plain", "weighted"])
def test_rows_are_those_of_the_standard_dispatcher(layout, routed, on_input) -> None:
    x_TD = tokens(len(routed.ids_TK))
    given = TritonDispatcher(problem(on_input=on_input)).dispatch(x_TD, routed, layout, BLOCK, stale())
    wanted = StandardDispatcher(problem(on_input=on_input)).dispatch(
        x_TD.cpu(), Routed(routed.ids_TK.cpu(), routed.weights_TK.cpu()), layout, BLOCK, Workspace()
    )
    assert given.rows.counts_L.tolist() == wanted.rows.counts_L.tolist()
    assert torch.equal(given.row_TK.cpu() >= 0, wanted.row_TK >= 0)
    if layout is not RowLayout.MASKED:
        assert given.rows.starts_L.tolist() == wanted.rows.starts_L.tolist()
        assert torch.equal(given.row_TK.cpu(), wanted.row_TK)
    pairs = zip(given.rows.starts_L.tolist(), wanted.rows.starts_L.tolist(), wanted.rows.counts_L.tolist(), strict=True)
    for start, other, count in pairs:
        assert torch.equal(given.rows.x_RD[start : start + count].cpu(), wanted.rows.x_RD[other : other + count])
    assert (given.weights_TK is None) == on_input


@pytest.mark.parametrize("layout", [RowLayout.PADDED, RowLayout.MASKED])
@routings
def test_rows_that_an_expert_owns_and_no_token_fills_are_zero(layout, routed) -> None:
    rows = TritonDispatcher(problem()).dispatch(tokens(len(routed.ids_TK)), routed, layout, BLOCK, stale()).rows
    ends = [*rows.starts_L.tolist()[1:], len(rows.x_RD)]
    for start, end, count in zip(rows.starts_L.tolist(), ends, rows.counts_L.tolist(), strict=True):
        assert start % BLOCK == 0
        owned = end - start if layout is RowLayout.MASKED else math.ceil(count / BLOCK) * BLOCK
        assert start + owned <= end
        assert not rows.x_RD[start + count : start + owned].any()


@layouts
@routings
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_combine_brings_each_row_home_with_its_weight(layout, routed, dtype) -> None:
    """Experts that double what they got; what nobody may read is NaN."""
    x_TD, chosen, workspace = tokens(len(routed.ids_TK), dtype), TritonDispatcher(problem()), stale()
    dispatched = chosen.dispatch(x_TD, routed, layout, BLOCK, workspace)
    y_RD = torch.full_like(dispatched.rows.x_RD, math.nan)
    here = dispatched.row_TK[dispatched.row_TK >= 0]
    y_RD[here] = dispatched.rows.x_RD[here] * 2
    out_TD = torch.full_like(x_TD, math.nan)
    chosen.combine(y_RD, dispatched, out_TD, workspace)
    weights_T1 = (routed.weights_TK * (dispatched.row_TK >= 0)).sum(-1, keepdim=True)
    error = out_TD.double() - 2.0 * x_TD.double() * weights_T1
    # The interpreter cuts bf16 off where a GPU rounds it.
    limit = 3e-7 if dtype is torch.float32 else 4e-3
    assert error.square().mean().sqrt() <= limit * (2 * x_TD.double() * weights_T1).square().mean().sqrt() or not len(
        x_TD
    )


def test_a_nan_weight_of_a_slot_computed_elsewhere_stays_out_of_the_sum() -> None:
    routed = Routed(
        torch.tensor([[2, -1, EXPERTS]], device=DEVICE), torch.tensor([[1.0, math.nan, 2.0]], device=DEVICE)
    )
    chosen, x_TD = TritonDispatcher(problem()), tokens(1)
    dispatched = chosen.dispatch(x_TD, routed, RowLayout.SORTED, 1, stale())
    out_TD = torch.full_like(x_TD, math.nan)
    chosen.combine(dispatched.rows.x_RD, dispatched, out_TD, stale())
    assert torch.equal(out_TD, x_TD)


@layouts
def test_more_slots_than_one_tile_holds_are_numbered_on(layout, monkeypatch) -> None:
    monkeypatch.setattr("muster.moe.kernels.triton_sort._IDS", 32)
    routed, x_TD = drawn(25, 6, FIRST, FIRST + 2), tokens(25)
    given = TritonDispatcher(problem()).dispatch(x_TD, routed, layout, 1, Workspace(DEVICE))
    for local in range(LOCAL):
        start, count = int(given.rows.starts_L[local]), int(given.rows.counts_L[local])
        wanted = (routed.ids_TK == FIRST + local).nonzero()[:, 0]
        assert torch.equal(given.rows.x_RD[start : start + count], x_TD[wanted])
