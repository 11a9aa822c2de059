"""What a sequence keeps: published figures reproduced, and causality counted exactly."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.inventory import Inventory
from muster.lab.explain.cache import Kept, Memory, SequenceMemory

inventory_of = cache(Inventory.of)

# Bytes per token in BF16 and in FP8, windows left out.
TOKEN = {
    "qwen3.5-397b-a17b": (30_720, 15_360),
    "qwen3.5-122b-a10b": (24_576, 12_288),
    "qwen3.5-35b-a3b": (20_480, 10_240),
    "qwen3-next-80b-a3b": (24_576, 12_288),
    "qwen3-235b-a22b": (192_512, 96_256),
    "qwen3-30b-a3b": (98_304, 49_152),
    "deepseek-v3": (70_272, 40_016),
    "kimi-k2": (70_272, 40_016),
    "glm-5": (89_856 + 10_296, 51_168 + 10_296),
    "glm-5.2": (89_856 + 2_772, 51_168 + 2_772),
    "deepseek-v3.2": (70_272 + 8_052, 40_016 + 8_052),
    "glm-4.7": (376_832, 188_416),
    "glm-4.5-air": (188_416, 94_208),
    "gpt-oss-120b": (36_864, 18_432),
    "gpt-oss-20b": (24_576, 12_288),
    "mixtral-8x7b": (131_072, 65_536),
    "olmoe-1b-7b": (131_072, 65_536),
    "minimax-m2.5": (253_952, 126_976),
}

# Bytes per sequence: recurrent states with their convolutions' inputs, or full windows.
FIXED = {
    "qwen3.5-397b-a17b": 188_743_680 + 2 * 1_658_880,
    "qwen3.5-122b-a10b": 150_994_944 + 2 * 36 * 12_288 * 3,
    "qwen3.5-35b-a3b": 62_914_560 + 2 * 30 * 8_192 * 3,
    "qwen3-next-80b-a3b": 75_497_472 + 2 * 36 * 8_192 * 3,
    "gpt-oss-120b": 4_718_592,
    "gpt-oss-20b": 3_145_728,
    "glm-5": 0,
}

DRAFT = {"qwen3.5-397b-a17b": 2_048, "qwen3-next-80b-a3b": 2_048, "deepseek-v3": 1_152, "glm-5.2": 1_152 + 132}


@pytest.mark.parametrize("name", TOKEN)
def test_bytes_per_token_are_the_published_ones(name: str) -> None:
    spec = inventory_of(name).spec
    found = tuple(SequenceMemory.of(spec, format).token_bytes() for format in ("bf16", "fp8"))
    assert found == TOKEN[name]


@pytest.mark.parametrize("name", FIXED)
def test_bytes_per_sequence_are_the_published_ones(name: str) -> None:
    assert SequenceMemory.of(inventory_of(name).spec).fixed() == FIXED[name]


@pytest.mark.parametrize("name", DRAFT)
def test_a_draft_layer_keeps_its_own_keys(name: str) -> None:
    assert SequenceMemory.of_draft(inventory_of(name).spec).token_bytes() == DRAFT[name]


@pytest.mark.parametrize("name", TOKEN)
@given(context=st.integers(0, 1 << 20))
def test_a_longer_sequence_never_keeps_less_and_at_most_a_token_more(name: str, context: int) -> None:
    memory = SequenceMemory.of(inventory_of(name).spec)
    grown = memory.held(context + 1) - memory.held(context)
    windowed = sum(kept.token for kept in memory.layers if kept.window is not None)
    assert memory.token_bytes() <= grown <= memory.token_bytes() + windowed


@given(
    past=st.integers(0, 300),
    tokens=st.integers(1, 60),
    limit=st.none() | st.integers(1, 200),
    chosen=st.booleans(),
)
def test_operations_count_what_each_query_attends_to(past: int, tokens: int, limit: int | None, chosen: bool) -> None:
    kept = Kept(Memory.KEYS, token=2, score=3, chosen=limit if chosen else None, window=None if chosen else limit)
    attended = [min(past + query + 1, limit or past + tokens) for query in range(tokens)]
    assert kept.operations(past, tokens) == 3 * sum(attended)


@given(past=st.integers(0, 300), tokens=st.integers(1, 60), window=st.integers(1, 100))
def test_a_window_reads_the_keys_that_any_of_its_queries_sees(past: int, tokens: int, window: int) -> None:
    kept = Kept(Memory.WINDOW, token=2, window=window)
    seen = {key for q in range(past, past + tokens) for key in range(max(0, q - window + 1), q + 1)}
    assert kept.read(past, tokens) == 2 * len(seen)


def test_ranks_share_keys_by_head_and_copy_latents() -> None:
    keys = SequenceMemory.of(inventory_of("qwen3.5-397b-a17b").spec)
    assert keys.token_bytes(2) == keys.token_bytes() / 2
    assert keys.token_bytes(8) == keys.token_bytes() / 2
    latents = SequenceMemory.of(inventory_of("glm-5").spec)
    assert latents.token_bytes(8) == latents.token_bytes()


def test_a_step_reads_only_the_tokens_that_an_indexer_chose() -> None:
    spec = inventory_of("deepseek-v3.2").spec
    latents = SequenceMemory.of(spec).by_memory()[Memory.LATENT]
    assert sum(kept.read(100_000, 1) for kept in latents) == 61 * 2048 * 1152
    indexers = SequenceMemory.of(spec).by_memory()[Memory.INDEXER]
    assert sum(kept.read(99_999, 1) for kept in indexers) == 61 * 100_000 * 132


def test_latents_of_a_fresh_prompt_are_expanded_once_and_those_of_a_cache_are_absorbed() -> None:
    kept = SequenceMemory.of(inventory_of("deepseek-v3").spec).layers[0]
    assert kept.operations(0, 2) == 2 * 128 * (128 + 64 + 128) * (1 + 2)
    assert kept.operations(1, 1) == 2 * 128 * (512 + 512 + 64) * 2
