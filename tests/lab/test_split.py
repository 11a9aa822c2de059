"""Splits over GPUs: what each one holds, what does not divide, and the price of padding."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint import presets
from muster.checkpoint.inventory import Inventory
from muster.checkpoint.kinds import Kind
from muster.errors import UsageError
from muster.lab.explain.memory import Load, demand
from muster.lab.explain.split import Split, hindrances, legal, nearest, share

inventory_of = cache(Inventory.of)
MANY = ("qwen3.5-397b-a17b-nvfp4", "glm-5-nvfp4", "gpt-oss-120b", "deepseek-v3", "kimi-k2.5", "glm-4.5-air-fp8")


@pytest.mark.parametrize("name", MANY)
@pytest.mark.parametrize("split", [Split(2), Split(8), Split(8, 8), Split(1, 8), Split(4, 2)], ids=str)
def test_gpus_together_hold_every_loaded_byte_at_least_once(name: str, split: Split) -> None:
    inventory = inventory_of(name)
    for module in inventory.modules.values():
        part = share(module, inventory.spec, split)
        loaded = module.kind is not Kind.VISION and not (module.draft and module.kind in (Kind.EMBEDDING, Kind.HEAD))
        assert part * split.gpus >= 1 if loaded else part == 0, module.name
        assert part <= 1


def test_one_gpu_holds_everything_but_vision_and_repeated_tables() -> None:
    inventory = inventory_of("deepseek-v3")
    need = demand(inventory, Split(), Load(1, 0))
    repeated = 2 * 129_280 * 7_168 * 2
    assert need.weights + need.draft == inventory.nbytes - repeated
    qwen = inventory_of("qwen3.5-397b-a17b-nvfp4")
    vision = sum(module.nbytes for module in qwen.modules.values() if module.kind is Kind.VISION)
    need = demand(qwen, Split(), Load(1, 0))
    assert need.weights + need.draft == qwen.nbytes - vision
    assert need.draft == pytest.approx(13.19e9, rel=0.001)


def test_whole_experts_are_legal_where_their_width_is_not_divisible() -> None:
    inventory = inventory_of("gpt-oss-120b")
    found = hindrances(inventory, Split(8))
    assert len(found) == 1
    assert not legal(inventory, Split(8))
    assert "360 each" in found[0].reason
    assert "3,072" in found[0].remedy
    routed = sum(m.nbytes for m in inventory.modules.values() if m.kind is Kind.ROUTED and m.format is not None)
    assert found[0].price == routed * (3072 - 2880) // 2880
    assert Split(8, 8) in nearest(inventory, Split(8))
    assert legal(inventory, Split(8, 8))


def test_scale_blocks_may_not_be_torn() -> None:
    # 1,536 over eight ranks is 192: not a multiple of the 128 rows that share a scale in FP8 blocks.
    assert legal(inventory_of("qwen3-235b-a22b"), Split(8))
    fp8 = inventory_of("qwen3-235b-a22b-fp8")
    assert not legal(fp8, Split(8))
    assert any("192 each" in one.reason for one in hindrances(fp8, Split(8)))
    assert legal(fp8, Split(4))


def test_key_value_heads_are_copied_when_there_are_more_ranks_and_the_price_is_named() -> None:
    inventory = inventory_of("qwen3.5-397b-a17b-nvfp4")
    one = next(one for one in hindrances(inventory, Split(8)) if "key-value" in one.reason)
    assert one.harmless
    # Four copies instead of one of k_proj and v_proj, 2 x [512, 4096] in BF16 in 15 layers and the draft layer.
    assert one.price == 3 * 16 * 2 * 512 * 4096 * 2


def test_experts_that_do_not_divide_leave_empty_places() -> None:
    inventory = inventory_of("glm-4.7")
    one = next(one for one in hindrances(inventory, Split(1, 64)) if "experts over" in one.reason)
    assert "3 places in each, 32 empty" in one.remedy
    routed = sum(module.nbytes for module in inventory.modules.values() if module.kind is Kind.ROUTED)
    assert one.price == routed * 32 // 160


@pytest.mark.parametrize(("tensor", "expert"), [(0, 1), (3, 2), (1, 0), (1 << 20, 1)])
def test_a_split_that_is_none_is_refused(tensor: int, expert: int) -> None:
    with pytest.raises(UsageError, match="--tp and --ep"):
        Split(tensor, expert)


@given(name=st.sampled_from(presets.names()), power=st.integers(0, 5), expert=st.integers(0, 5))
@settings(max_examples=30, deadline=None)
def test_every_illegal_split_has_reasons_and_legal_neighbours(name: str, power: int, expert: int) -> None:
    inventory, split = inventory_of(name), Split(1 << power, 1 << expert)
    found = hindrances(inventory, split)
    assert legal(inventory, split) == all(one.harmless for one in found)
    assert all(one.price >= 0 and one.reason for one in found)
    if not legal(inventory, split):
        near = nearest(inventory, split)
        assert near
        assert all(legal(inventory, one) for one in near)


@given(name=st.sampled_from(MANY), power=st.integers(0, 3), context=st.integers(0, 1 << 17))
@settings(max_examples=20, deadline=None)
def test_the_room_that_is_promised_is_there(name: str, power: int, context: int) -> None:
    inventory, split = inventory_of(name), Split(1 << power)
    budget = 150e9
    tokens = demand(inventory, split, Load(1, context)).tokens(budget)
    if tokens:
        assert demand(inventory, split, Load(1, tokens)).fits(budget * (1 + 1e-9))
        longer = demand(inventory, split, Load(1, tokens + 2))
        assert not longer.fits(budget)


def test_more_gpus_hold_less_each() -> None:
    inventory = inventory_of("glm-5-nvfp4")
    totals = [demand(inventory, Split(1 << power), Load()).total for power in range(4)]
    assert totals == sorted(totals, reverse=True)
