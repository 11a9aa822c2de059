"""The standard dispatcher: every real row once in every layout, and a combine that brings each one home."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.errors import UsageError
from muster.moe.backend import Routed, RowLayout
from muster.moe.dispatch import load_dispatcher
from muster.moe.problem import MoEProblem, RoutingRule
from muster.workspace import Workspace

HIDDEN, EXPERTS, FIRST, LOCAL, BLOCK = 5, 9, 2, 4, 8
layouts = pytest.mark.parametrize("layout", RowLayout)


def dispatcher(on_input: bool = False, dtype="f32"):
    problem = MoEProblem(HIDDEN, 3, EXPERTS, RoutingRule(3), LOCAL, FIRST, dtype=dtype, router_weight_on_input=on_input)
    return load_dispatcher("standard")(problem)


def stale() -> Workspace:
    """A workspace whose buffers hold NaN from earlier use."""
    workspace = Workspace()
    for name in ("dispatch rows", "sum"):
        workspace.take(name, (4000,), torch.float32).fill_(math.nan)
    return workspace


def routed_by(ids_TK: list[list[int]], top_k: int = 3) -> Routed:
    ids = torch.tensor(ids_TK, dtype=torch.int64).view(-1, top_k)
    weights = torch.rand(ids.shape, generator=torch.Generator().manual_seed(5)) + 0.5
    return Routed(ids, weights)


def tokens(count: int) -> torch.Tensor:
    """Rows that tell which token they are."""
    return torch.arange(1.0, count + 1)[:, None] * torch.ones(HIDDEN)


any_ids = st.lists(st.lists(st.integers(-2, EXPERTS + 1), min_size=3, max_size=3), max_size=30)


@layouts
@given(ids_TK=any_ids)
@settings(max_examples=40, deadline=None)
def test_each_local_slot_gets_one_row_in_token_order(layout, ids_TK):
    x_TD, routed = tokens(len(ids_TK)), routed_by(ids_TK)
    dispatched = dispatcher().dispatch(x_TD, routed, layout, BLOCK, stale())
    rows = dispatched.rows
    expected = [[t + 1 for t, ids in enumerate(ids_TK) for e in ids if e == FIRST + local] for local in range(LOCAL)]
    real = [
        rows.x_RD[start : start + count, 0].tolist()
        for start, count in zip(rows.starts_L.tolist(), rows.counts_L.tolist(), strict=True)
    ]
    assert real == expected
    assert rows.counts_L.dtype is rows.starts_L.dtype is torch.int64
    here = (routed.ids_TK >= FIRST) & (routed.ids_TK < FIRST + LOCAL)
    assert torch.equal(dispatched.row_TK >= 0, here)
    assert torch.equal(rows.x_RD[dispatched.row_TK[here], 0], (here.nonzero()[:, 0] + 1).float())


@layouts
@given(ids_TK=any_ids)
@settings(max_examples=40, deadline=None)
def test_layout_keeps_its_promise_and_other_rows_are_zero(layout, ids_TK):
    rows = dispatcher().dispatch(tokens(len(ids_TK)), routed_by(ids_TK), layout, BLOCK, stale()).rows
    counts, starts, total = rows.counts_L.tolist(), rows.starts_L.tolist(), len(rows.x_RD)
    if layout is RowLayout.SORTED:
        assert starts == [sum(counts[:local]) for local in range(LOCAL)]
        assert total == sum(counts)
    elif layout is RowLayout.PADDED:
        padded = [math.ceil(count / BLOCK) * BLOCK for count in counts]
        assert starts == [sum(padded[:local]) for local in range(LOCAL)]
        assert total == sum(padded)
    else:
        assert total % LOCAL == 0
        assert starts == [local * (total // LOCAL) for local in range(LOCAL)]
        assert max(counts) <= total // LOCAL
    real = torch.zeros(total, dtype=torch.bool)
    for start, count in zip(starts, counts, strict=True):
        real[start : start + count] = True
    assert not rows.x_RD[~real].any()


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(ids_TK=any_ids)
@settings(max_examples=40, deadline=None)
def test_combine_inverts_dispatch(layout, dtype, ids_TK):
    """Experts that give back what they got: each token becomes itself times the weights of its local slots."""
    x_TD, routed, workspace = tokens(len(ids_TK)).to(dtype), routed_by(ids_TK), stale()
    chosen = dispatcher()
    dispatched = chosen.dispatch(x_TD, routed, layout, BLOCK, workspace)
    y_RD = torch.full_like(dispatched.rows.x_RD, math.nan)
    here = dispatched.row_TK[dispatched.row_TK >= 0]
    y_RD[here] = dispatched.rows.x_RD[here]
    out_TD = torch.full_like(x_TD, math.nan)
    chosen.combine(y_RD, dispatched, out_TD, workspace)
    expected = x_TD.float() * (routed.weights_TK * (dispatched.row_TK >= 0)).sum(-1, keepdim=True)
    torch.testing.assert_close(out_TD, expected.to(dtype), rtol=1e-6 if dtype is torch.float32 else 8e-3, atol=0)


@layouts
def test_routing_weight_on_input_multiplies_the_row_and_not_the_result(layout):
    x_TD, routed = tokens(4), routed_by([[2, 3, 4], [5, 2, -1], [8, 0, 3], [4, 4, 9]])
    chosen = dispatcher(on_input=True)
    dispatched = chosen.dispatch(x_TD, routed, layout, BLOCK, stale())
    here = dispatched.row_TK >= 0
    expected = (x_TD[:, None, 0] * routed.weights_TK)[here]
    assert torch.equal(dispatched.rows.x_RD[dispatched.row_TK[here], 0], expected)
    out_TD = torch.full_like(x_TD, math.nan)
    chosen.combine(torch.ones_like(dispatched.rows.x_RD), dispatched, out_TD, stale())
    assert torch.equal(out_TD[:, 0], here.sum(-1).float())


@layouts
def test_sum_of_a_token_is_bitwise_the_same_in_any_batch(layout):
    generator = torch.Generator().manual_seed(1)
    ids = torch.rand(40, LOCAL, generator=generator).argsort(-1)[:, :3] + FIRST
    x_TD = torch.randn(40, HIDDEN, generator=generator)
    weights = torch.rand(40, 3, generator=generator)
    chosen = dispatcher()

    def layer(some):
        dispatched = chosen.dispatch(x_TD[some], Routed(ids[some], weights[some]), layout, BLOCK, stale())
        out_TD = torch.full((len(some), HIDDEN), math.nan)
        chosen.combine(dispatched.rows.x_RD * 3.1, dispatched, out_TD, stale())
        return out_TD

    everything = layer(list(range(40)))
    assert torch.equal(layer([7, 3, 31]), everything[[7, 3, 31]])


def test_nan_in_a_row_stays_with_its_token_even_beside_sentinels():
    routed, chosen = routed_by([[2, 3, 4], [-1, 2, EXPERTS], [-1, -1, -1]]), dispatcher()
    dispatched = chosen.dispatch(tokens(3), routed, RowLayout.SORTED, 1, Workspace())
    y_RD = torch.ones_like(dispatched.rows.x_RD)
    y_RD[dispatched.row_TK[0]] = math.nan
    out_TD = torch.full((3, HIDDEN), math.nan)
    chosen.combine(y_RD, dispatched, out_TD, Workspace())
    assert out_TD.isnan().all(-1).tolist() == [True, False, False]
    assert not out_TD[2].any()


def test_unknown_dispatcher_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match=r"'teleport'.*standard"):
        load_dispatcher("teleport")
