"""Released checkpoints by name: the shape model reproduces what is published of their files, to the byte."""

from __future__ import annotations

from collections import Counter
from math import prod

import pytest

from muster.checkpoint import presets
from muster.checkpoint.config import interpret
from muster.checkpoint.header import BITS
from muster.checkpoint.inventory import Inventory
from muster.checkpoint.kinds import Kind
from muster.checkpoint.storage import headers
from muster.errors import UsageError

BYTES = {
    "qwen3.5-397b-a17b": 806_795_875_168,
    "qwen3.5-122b-a10b": 250_173_007_840,
    "qwen3.5-122b-a10b-nvfp4": 83_474_870_752,
    "qwen3.6-35b-a3b": 71_903_645_408,
    "qwen3-30b-a3b": 61_064_245_248,
    "qwen3-235b-a22b": 470_187_269_120,
    "deepseek-v3": 688_574_839_360,
    "glm-5.1": 1_507_728_316_928,
    "glm-5.2-fp8": 755_617_140_416,
    "gpt-oss-120b": 65_248_815_744,
    "gpt-oss-20b": 13_761_264_768,
    "mixtral-8x7b": 93_405_585_408,
    "olmoe-1b-7b": 13_838_323_712,
}
"""Published sums of tensor bytes: `total_size` of the index files, or all headers added up."""

TENSORS = {
    "qwen3.5-397b-a17b": 2_924,
    "qwen3.5-122b-a10b-fp8": 76_656,
    "qwen3.5-122b-a10b-nvfp4": 149_309,
    "qwen3.5-122b-a10b-nvfp4-ct": 149_885,
    "qwen3.6-35b-a3b-fp8": 64_196,
    "qwen3.6-35b-a3b-nvfp4": 124_468,
    "qwen3-235b-a22b": 36_945,
    "qwen3-coder-next-nvfp4": 296_151,
    "deepseek-v3": 91_991,
    "glm-5.1": 59_870,
    "glm-5.2": 59_585,
    "glm-5.2-fp8": 118_629,
    "glm-4.7-nvfp4": 173_863,
    "gpt-oss-20b": 459,
}
"""Published counts of tensors: header audits and index files."""


@pytest.mark.parametrize("name", BYTES)
def test_a_release_has_exactly_the_published_bytes(name: str) -> None:
    assert Inventory.of(name).nbytes == BYTES[name]


@pytest.mark.parametrize("name", TENSORS)
def test_a_release_has_exactly_the_published_number_of_tensors(name: str) -> None:
    assert Inventory.of(name).tensors == TENSORS[name]


def elements(name: str) -> Counter[str]:
    """Elements by dtype, as a hub's page counts them."""
    preset = presets.preset(name)
    counted: Counter[str] = Counter()
    for header in headers(preset.spec, preset.layout):
        counted[header.dtype] += prod(header.shape)
    return counted


def test_qwen3_5_397b_stores_ninety_vectors_in_float32() -> None:
    preset = presets.preset("qwen3.5-397b-a17b")
    assert Counter(header.dtype for header in headers(preset.spec, preset.layout)) == {"BF16": 2_834, "F32": 90}


def test_qwen3_5_122b_nvfp4_has_the_published_elements_of_each_dtype() -> None:
    counted = elements("qwen3.5-122b-a10b-nvfp4")
    published = {"BF16": 9_122_380_016, "F8_E4M3": 7_247_757_312, "U8": 57_982_058_496}
    assert {dtype: counted[dtype] for dtype in published} == published


def test_qwen3_5_397b_nvfp4_v2_has_the_published_elements_and_about_the_published_size() -> None:
    """The published count takes four-bit codes by the byte and leaves scales out; the size is rounded to 0.1 GB."""
    inventory = Inventory.of("qwen3.5-397b-a17b-nvfp4-v2")
    by_byte = sum(m.parameters // 2 if m.stored == "nvfp4" else m.parameters for m in inventory.modules.values())
    assert by_byte == 210_124_400_624
    assert inventory.nbytes == pytest.approx(243.7e9, rel=1e-3)


def test_the_vision_tower_of_qwen3_5_has_the_published_tensors_and_parameters() -> None:
    tower = [m for m in Inventory.of("qwen3.5-397b-a17b").modules.values() if m.kind is Kind.VISION]
    assert (sum(m.tensors for m in tower), sum(m.parameters for m in tower)) == (333, 456_010_480)


PARAMETERS = {
    "qwen3.5-397b-a17b": (396_346_350_336, 6_595_568_128),
    "qwen3.5-122b-a10b": (122.11e9, 2.524e9),
    "qwen3.5-35b-a3b": (34.66e9, 0.845e9),
    "qwen3-next-80b-a3b": (None, 1.65e9),
    "glm-5": (None, 9.95e9),
    "glm-4.5": (None, 3.99e9 + 2 * 151552 * 5120),
}
"""Parameters of the text model and of the draft layer, copies of embedding and head included where stored."""


@pytest.mark.parametrize("name", PARAMETERS)
def test_text_and_draft_have_the_published_parameters(name: str) -> None:
    text, draft = PARAMETERS[name]
    modules = [m for m in Inventory.of(name).modules.values() if m.kind is not Kind.VISION]
    assert sum(m.parameters for m in modules if m.draft) == pytest.approx(draft, rel=1.5e-3)
    if text is not None:
        assert sum(m.parameters for m in modules if not m.draft) == pytest.approx(text, rel=2e-4)


@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3.5-122b-a10b", "qwen3-30b-a3b-fp8", "glm-5.1", "gpt-oss-20b"])
def test_every_tensor_of_a_release_has_one_name_and_is_counted_once(name: str) -> None:
    preset, inventory = presets.preset(name), Inventory.of(name)
    names = set()
    nbytes = 0
    for header in headers(preset.spec, preset.layout):
        names.add(header.name)
        nbytes += prod(header.shape) * BITS[header.dtype] // 8
    assert (len(names), nbytes) == (inventory.tensors, inventory.nbytes)


@pytest.mark.parametrize("name", presets.names())
def test_every_module_of_a_release_has_its_place(name: str) -> None:
    inventory = Inventory.of(name)
    modules = inventory.modules.values()
    assert not {module.name for module in modules if module.kind is Kind.OTHER}
    outside = {module.kind for module in modules if module.layer is None}
    assert outside <= {Kind.EMBEDDING, Kind.HEAD, Kind.NORM, Kind.VISION}
    assert len(inventory.draft_layers) == presets.preset(name).layout.draft_layers


SCHEMES = {
    "qwen3.5-397b-a17b-nvfp4": {"nvfp4 W4A4", "bf16 W16A16"},
    "qwen3.5-397b-a17b-nvfp4-v2": {"nvfp4 W4A4", "fp8-tensor W8A8", "bf16 W16A16"},
    "qwen3.6-35b-a3b-nvfp4": {"nvfp4 W4A16", "fp8-tensor W8A8", "bf16 W16A16"},
    "deepseek-r1": {"fp8-block W8A8", "bf16 W16A16"},
    "gpt-oss-120b": {"mxfp4 W4A16", "bf16 W16A16"},
    "kimi-k2.5": {"int4-g32 W4A16", "bf16 W16A16"},
}


@pytest.mark.parametrize("name", SCHEMES)
def test_the_scheme_says_bits_of_weights_and_of_inputs(name: str) -> None:
    modules = Inventory.of(name).modules.values()
    assert {f"{m.stored} {m.scheme}" for m in modules if m.scheme} == SCHEMES[name]


def test_only_listed_modules_of_deepseek_nvfp4_stay_plain() -> None:
    layer = {m.name.rpartition(".")[2]: m.stored for m in Inventory.of("deepseek-v3.1-nvfp4").layer(10)}
    assert layer["o_proj"] == layer["gate_proj"] == layer["down_proj"] == "nvfp4"
    assert {layer[part] for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "gate")} == {"bf16"}
    assert {m.stored for m in Inventory.of("deepseek-v3.1-nvfp4").layer(61) if m.format} == {"bf16"}


def test_an_unknown_name_lists_those_like_it() -> None:
    with pytest.raises(UsageError, match=r"hint: did you mean .*glm-5-nvfp4"):
        presets.preset("glm5-nvfp4")
    with pytest.raises(UsageError, match=r"hint: did you mean .*qwen3.5-397b-a17b-nvfp4"):
        presets.preset("nvidia/Qwen3.5-397B-A17B-NVFP4x")
    with pytest.raises(UsageError, match="hint: the names are deepseek-r1, "):
        presets.preset("?")


def test_a_preset_is_what_its_config_says() -> None:
    preset = presets.preset("qwen3.5-397b-a17b-nvfp4")
    assert interpret(preset.config).spec == preset.spec
    assert preset.repository == "nvidia/Qwen3.5-397B-A17B-NVFP4"
