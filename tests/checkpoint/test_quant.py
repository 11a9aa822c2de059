from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from configs import Config, config
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.config import interpret
from muster.checkpoint.index import CheckpointIndex, TensorEntry
from muster.checkpoint.patterns import Patterns
from muster.checkpoint.quant import Survey, survey
from muster.checkpoint.spec import ModelSpec, QuantClaim
from muster.errors import CheckpointError, ConfigError
from muster.formats.dialects import Dialect
from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, Format, int4

Tensors = dict[str, tuple[str, tuple[int, ...]]]

N, K = 256, 128

SPELLINGS: dict[Dialect, tuple[Tensors, Format]] = {
    Dialect.PLAIN: ({".weight": ("BF16", (N, K))}, BF16),
    Dialect.MODELOPT_NVFP4: (
        {
            ".weight": ("U8", (N, K // 2)),
            ".weight_scale": ("F8_E4M3", (N, K // 16)),
            ".weight_scale_2": ("F32", ()),
            ".input_scale": ("F32", ()),
        },
        NVFP4,
    ),
    Dialect.CT_NVFP4: (
        {
            ".weight_packed": ("U8", (N, K // 2)),
            ".weight_scale": ("F8_E4M3", (N, K // 16)),
            ".weight_global_scale": ("F32", (1,)),
        },
        NVFP4,
    ),
    Dialect.CT_MXFP4: ({".weight_packed": ("U8", (N, K // 2)), ".weight_scale": ("U8", (N, K // 32))}, MXFP4),
    Dialect.FP8_BLOCK: ({".weight": ("F8_E4M3", (N, K)), ".weight_scale_inv": ("BF16", (2, 1))}, FP8_BLOCK),
    Dialect.MODELOPT_FP8: (
        {".weight": ("F8_E4M3", (N, K)), ".weight_scale": ("F32", ()), ".input_scale": ("F32", ())},
        FP8_TENSOR,
    ),
    Dialect.CT_FP8: ({".weight": ("F8_E4M3", (N, K)), ".weight_scale": ("BF16", (N, 1))}, FP8_CHANNEL),
    Dialect.CT_INT4: (
        {
            ".weight_packed": ("I32", (N, K // 8)),
            ".weight_scale": ("BF16", (N, K // 32)),
            ".weight_shape": ("I64", (2,)),
        },
        int4(32),
    ),
    Dialect.GPTQ: (
        {
            ".qweight": ("I32", (K // 8, N)),
            ".qzeros": ("I32", (K // 32, N // 8)),
            ".scales": ("F16", (K // 32, N)),
            ".g_idx": ("I32", (K,)),
        },
        int4(32),
    ),
    Dialect.AWQ: (
        {
            ".qweight": ("I32", (K, N // 8)),
            ".qzeros": ("I32", (K // 32, N // 8)),
            ".scales": ("F16", (K // 32, N)),
        },
        int4(32),
    ),
}

BLOCK_FP8: Config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
MODELOPT: Config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def index(tensors: Tensors) -> CheckpointIndex:
    entries = {name: TensorEntry(name, dtype, shape, Path("x"), 0, 0) for name, (dtype, shape) in tensors.items()}
    return CheckpointIndex(Path("checkpoint"), entries)


def stored(module: str, dialect: Dialect) -> Tensors:
    return {module + part: entry for part, entry in SPELLINGS[dialect][0].items()}


def model(claim: Config | None, family: str = "qwen3_moe") -> ModelSpec:
    return interpret(config(family, **({} if claim is None else {"quantization_config": claim}))).spec


def look(claim: Config | None, modules: dict[str, Dialect], family: str = "qwen3_moe") -> Survey:
    tensors: Tensors = {}
    for module, dialect in modules.items():
        tensors |= stored(module, dialect)
    return survey(index(tensors), model(claim, family))


def layers(*modules: str, count: int = 4) -> list[str]:
    return [f"model.layers.{layer}.{module}" for layer in range(count) for module in modules]


def checkpoint(decide: Callable[[str], Dialect], *, experts: int = 8, count: int = 4) -> dict[str, Dialect]:
    names = [f"mlp.experts.{e}.{part}_proj" for e in range(experts) for part in ("gate", "up", "down")]
    names += [*(f"self_attn.{part}_proj" for part in "qkvo"), "mlp.gate"]
    return {name: decide(name) for name in [*layers(*names, count=count), "model.embed_tokens", "lm_head"]}


def experts_only(dialect: Dialect) -> Callable[[str], Dialect]:
    return lambda name: dialect if ".experts." in name else Dialect.PLAIN


# What is stored


@pytest.mark.parametrize("dialect", SPELLINGS)
def test_every_dialect_is_recognised_from_headers(dialect: Dialect) -> None:
    module = look(None, {"model.layers.0.mlp.down_proj": dialect}).modules["model.layers.0.mlp.down_proj"]
    assert (module.dialect, module.format, module.shape) == (dialect, SPELLINGS[dialect][1], (N, K))
    assert set(module.parts.values()) == stored("model.layers.0.mlp.down_proj", dialect).keys()


def test_stacked_experts_are_modules_of_their_own() -> None:
    root = "model.layers.0.mlp.experts"
    tensors: Tensors = {
        f"{root}.gate_up_proj": ("BF16", (4, 2 * N, K)),
        f"{root}.down_proj_blocks": ("U8", (4, N, K // 32, 16)),
        f"{root}.down_proj_scales": ("U8", (4, N, K // 32)),
        f"{root}.down_proj_bias": ("BF16", (4, N)),
    }
    modules = survey(index(tensors), model(None)).modules
    assert modules[f"{root}.gate_up_proj"][:3] == (Dialect.PLAIN, BF16, (4, 2 * N, K))
    assert modules[f"{root}.down_proj"][:3] == (Dialect.GPT_OSS_MXFP4, MXFP4, (4, N, K))
    assert len(modules) == 2


def test_stacked_nvfp4_experts_have_parts_without_a_dot() -> None:
    root = "model.layers.0.mlp.experts.gate_up_proj"
    tensors: Tensors = {
        root: ("U8", (4, N, K // 2)),
        f"{root}_scale": ("F8_E4M3", (4, N, K // 16)),
        f"{root}_scale_2": ("F32", (4,)),
    }
    module = survey(index(tensors), model(None)).modules[root]
    assert (module.format, module.shape) == (NVFP4, (4, N, K))
    assert module.parts["weight_scale_2"] == f"{root}_scale_2"


def test_norms_and_biases_are_no_matrices() -> None:
    tensors: Tensors = {"model.norm.weight": ("F32", (K,)), "a.bias": ("BF16", (N,)), "a.A_log": ("F32", (4,))}
    assert not survey(index(tensors), model(None)).modules


@pytest.mark.parametrize(("variant", "dialect"), [("gptq", Dialect.GPTQ), ("gptq_v2", Dialect.GPTQ_V2)])
def test_gptq_versions_are_told_apart_by_the_config(variant: str, dialect: Dialect) -> None:
    claim = {"quant_method": "gptq", "bits": 4, "group_size": 32, "checkpoint_format": variant}
    found = look(claim, {"model.layers.0.mlp.experts.0.up_proj": Dialect.GPTQ})
    assert [module.dialect for module in found.modules.values()] == [dialect]
    assert not found.disagreements


# Damaged modules


@pytest.mark.parametrize("dialect", [dialect for dialect in SPELLINGS if dialect is not Dialect.PLAIN])
def test_every_missing_part_is_named(dialect: Dialect) -> None:
    for part in (part for part in dialect.parts if part.required):
        tensors = stored("model.layers.0.mlp.down_proj", dialect)
        del tensors[f"model.layers.0.mlp.down_proj.{part.name}"]
        with pytest.raises(CheckpointError, match=r"model\.layers\.0\.mlp\.down_proj.* without .*") as caught:
            survey(index(tensors), model(None))
        assert re.search(rf"without .*\b{part.name}\b", str(caught.value))


def test_two_dialects_in_one_module_are_an_error() -> None:
    tensors = stored("a", Dialect.MODELOPT_NVFP4) | stored("a", Dialect.CT_NVFP4)
    with pytest.raises(CheckpointError, match="two dialects"):
        survey(index(tensors), model(None))
    tensors = stored("a", Dialect.FP8_BLOCK) | {"a.weight_scale_2": ("F32", ())}
    with pytest.raises(CheckpointError, match="two dialects"):
        survey(index(tensors), model(None))


def test_unknown_dtypes_name_what_is_accepted() -> None:
    with pytest.raises(CheckpointError, match=r"weight F64.*BF16 or F16 or F32"):
        survey(index({"a.weight": ("F64", (N, K))}), model(None))


def test_the_same_damage_in_many_experts_is_one_line() -> None:
    tensors: Tensors = {}
    for name in layers(*(f"mlp.experts.{expert}.up_proj" for expert in range(8))):
        tensors |= stored(name, Dialect.CT_NVFP4)
        del tensors[f"{name}.weight_global_scale"]
    with pytest.raises(CheckpointError, match=r"layers\.\{0-3\}\.mlp\.experts\.\{0-7\}\.up_proj") as caught:
        survey(index(tensors), model(None))
    assert len(caught.value.reasons) == 1


# Claims against storage


@pytest.mark.parametrize(
    "ignore",
    [
        [*layers(*(f"self_attn.{part}_proj" for part in "qkvo")), "lm_head"],
        [*layers("self_attn*"), "lm_head*"],
        [*layers("self_attn"), "lm_head"],
        ["model.layers.*.self_attn", "lm_head"],
        ["*.self_attn.*", "lm_head"],
        [r"re:.*self_attn\..*", "lm_head"],
        [*layers("self_attn.qkv_proj", "self_attn.o_proj"), "lm_head"],
        ["self_attn", "lm_head"],
        [name.replace("model.", "model.language_model.") for name in layers("self_attn*")] + ["lm_head"],
        [name.replace("model.", "language_model.model.") for name in layers("self_attn*")] + ["language_model.lm_head"],
        [name.replace("model.", "") for name in layers("self_attn*")] + ["lm_head"],
        [*(f"model.layers.{layer}.self" for layer in range(4)), "lm_head"],
    ],
)
def test_every_way_to_write_an_exception_list_is_understood(ignore: list[str]) -> None:
    found = look({**MODELOPT, "ignore": ignore}, checkpoint(experts_only(Dialect.MODELOPT_NVFP4)))
    assert found.disagreements == ()
    assert all("mlp.gate" in note or "embed_tokens" in note for note in found.notes)


def test_an_exception_that_is_quantised_is_a_disagreement_with_its_pattern() -> None:
    claim = {**MODELOPT, "ignore": ["lm_head", *layers("self_attn*")]}
    decide = lambda name: Dialect.PLAIN if name.endswith(("gate", "head", "tokens")) else Dialect.MODELOPT_NVFP4  # noqa: E731
    (line,) = look(claim, checkpoint(decide)).disagreements
    for fragment in ("config.json: quantization_config", "self_attn* and 3 like it", "{0-3}.self_attn.q_proj",
                     "stored as nvfp4", "the tensors win"):  # fmt: skip
        assert fragment in line


def test_a_plain_matrix_in_no_exception_list_is_a_disagreement() -> None:
    (line,) = look({**MODELOPT, "ignore": ["lm_head"]}, checkpoint(experts_only(Dialect.MODELOPT_NVFP4))).disagreements
    assert "nvfp4 claimed for model.layers.{0-3}.self_attn.q_proj (4 modules)" in line
    assert "stored as bf16; the tensors win" in line


def test_another_format_than_claimed_is_a_disagreement() -> None:
    claim = {**BLOCK_FP8, "modules_to_not_convert": ["self_attn"]}
    (line,) = look(claim, checkpoint(experts_only(Dialect.MODELOPT_FP8))).disagreements
    assert "fp8-block claimed" in line
    assert "stored as fp8-tensor" in line


def test_quantised_tensors_without_any_claim_are_a_disagreement() -> None:
    (line,) = look(None, checkpoint(experts_only(Dialect.CT_NVFP4))).disagreements
    assert "no quantisation claimed" in line
    assert "mlp.experts.{0-7}" in line


def test_routers_embeddings_and_draft_inputs_are_notes() -> None:
    modules = checkpoint(experts_only(Dialect.MODELOPT_NVFP4)) | {"mtp.fc": Dialect.PLAIN}
    found = look({**MODELOPT, "ignore": ["lm_head", "*self_attn*"]}, modules)
    assert found.disagreements == ()
    assert [next(name for name in ("mlp.gate", "embed", "mtp.fc") if name in note) for note in found.notes] == [
        "mlp.gate",
        "embed",
        "mtp.fc",
    ]


def test_a_bare_gate_does_not_cover_gate_proj() -> None:
    patterns = Patterns(["gate"], "test")
    assert patterns.find("model.layers.0.mlp.gate") == "gate"
    assert patterns.find("model.layers.0.mlp.gate_proj") is None


def test_vision_towers_are_left_out_of_the_comparison() -> None:
    modules = {"model.visual.blocks.0.mlp.linear_fc1": Dialect.PLAIN, "vision_tower.a": Dialect.PLAIN}
    found = look(MODELOPT, modules)
    assert (found.disagreements, found.notes) == ((), ())


def test_mixed_claims_hold_module_by_module() -> None:
    root = "model.language_model.layers.3"
    claim = {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {
            f"{root}.self_attn.q_proj": {"quant_algo": "FP8"},
            f"{root}.mlp.experts": {"quant_algo": "W4A16_NVFP4", "group_size": 16},
        },
    }
    modules = {
        f"{root}.self_attn.q_proj": Dialect.MODELOPT_FP8,
        f"{root}.self_attn.o_proj": Dialect.PLAIN,
        f"{root}.mlp.experts.0.up_proj": Dialect.MODELOPT_NVFP4,
    }
    made = config("qwen3_5_moe")
    made["quantization_config"] = claim
    spec = interpret(made).spec

    def lines(modules: dict[str, Dialect]) -> tuple[str, ...]:
        return survey(index({n: e for m, d in modules.items() for n, e in stored(m, d).items()}), spec).disagreements

    assert lines(modules) == ()
    (line,) = lines(modules | {f"{root}.self_attn.o_proj": Dialect.MODELOPT_FP8})
    assert "no quantisation claimed for" in line
    assert "o_proj" in line
    (line,) = lines(modules | {f"{root}.self_attn.q_proj": Dialect.PLAIN})
    assert "fp8-tensor claimed by" in line


def test_single_experts_named_in_a_list_are_told_apart() -> None:
    names = [f"model.layers.0.mlp.experts.{expert}.up_proj" for expert in range(4)]
    modules = {name: Dialect.PLAIN if name == names[2] else Dialect.MODELOPT_NVFP4 for name in names}
    assert look({**MODELOPT, "ignore": [names[2]]}, modules).disagreements == ()
    (line,) = look({**MODELOPT, "ignore": [names[1]]}, modules | {names[2]: Dialect.MODELOPT_NVFP4}).disagreements
    assert names[1] in line


def test_a_pattern_that_is_no_expression_is_named() -> None:
    with pytest.raises(ConfigError, match=r"re:\(") as caught:
        look({**MODELOPT, "ignore": ["re:(", "re:["]}, checkpoint(experts_only(Dialect.MODELOPT_NVFP4)))
    assert len(caught.value.reasons) == 2


def test_300_000_tensors_take_about_a_second_and_give_a_handful_of_lines() -> None:
    modules = checkpoint(experts_only(Dialect.MODELOPT_NVFP4), experts=256, count=98)
    tensors = {name: entry for module, dialect in modules.items() for name, entry in stored(module, dialect).items()}
    whole = index(tensors)
    spec = model({**MODELOPT, "ignore": ["lm_head", *layers("self_attn.q_proj*", "self_attn.k_proj", count=98)]})
    started = time.process_time()
    found = survey(whole, spec)
    assert len(tensors) > 300_000
    assert time.process_time() - started < 5
    assert 1 <= len(found.disagreements) <= 3


# Patterns


@settings(max_examples=200, deadline=None)
@given(
    patterns=st.lists(st.text(alphabet="abq_proj.*?[]!re:()0\\", max_size=12), max_size=6),
    module=st.text(alphabet="abq_proj.0", max_size=16),
)
def test_any_list_finds_nothing_or_one_of_its_patterns(patterns: Sequence[str], module: str) -> None:
    try:
        found = Patterns(patterns, "test").find(module)
    except ConfigError:
        return
    assert found is None or found in patterns


@given(st.lists(st.sampled_from(["layers", "0", "mlp", "experts", "up_proj"]), min_size=1, max_size=6))
def test_a_name_and_its_parents_always_cover_it(parts: list[str]) -> None:
    name = ".".join(parts)
    for end in range(1, len(parts) + 1):
        pattern = ".".join(parts[:end])
        assert Patterns([pattern], "test").find(name) == pattern
        assert Patterns([pattern + "*"], "test").find(name) == pattern + "*"


# Claims as read from configs


@pytest.mark.parametrize(
    ("claim", "algorithm"),
    [
        ({"quant_method": "fp8"}, "fp8-tensor"),
        (BLOCK_FP8, "fp8-block"),
        (MODELOPT, "nvfp4"),
        ({"quant_method": "modelopt", "quant_algo": "FP8_PB_WO"}, "fp8-block"),
        ({"quant_method": "modelopt", "quantization": {"quant_algo": "FP8"}}, "fp8-tensor"),
        ({"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, "fp8-channel"),
        ({"quant_method": "mxfp4"}, "mxfp4"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "int4-g128"),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, "int4-g64"),
        ({"quant_method": "auto-round", "bits": 4, "group_size": 32}, "int4-g32"),
    ],
)
def test_methods_and_algorithms(claim: Config, algorithm: str) -> None:
    quant = model(claim).quant
    assert isinstance(quant, QuantClaim)
    assert quant.algorithm == algorithm


@pytest.mark.parametrize(
    ("packing", "weights", "algorithm"),
    [
        ("nvfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 16}, "nvfp4"),
        ("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "group_size": 32}, "mxfp4"),
        ("pack-quantized", {"num_bits": 4, "type": "int", "group_size": 32, "symmetric": True}, "int4-g32"),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}, "fp8-channel"),
        ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
         "fp8-block"),
    ],
)  # fmt: skip
def test_compressed_tensors_groups(packing: str, weights: Config, algorithm: str) -> None:
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    claim = {"quant_method": "compressed-tensors", "format": packing, "config_groups": groups, "ignore": ["lm_head"]}
    reading = interpret(config("kimi_k25", quantization_config=claim))
    quant = reading.spec.quant
    assert isinstance(quant, QuantClaim)
    assert (quant.algorithm, quant.ignore) == (algorithm, ("lm_head",))
    assert quant.source == "config.json: text_config.quantization_config"
    assert not reading.notes


@pytest.mark.parametrize(
    ("claim", "fragment"),
    [
        ({"quant_method": "quark"}, "one of modelopt"),
        ({}, "quant_method"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ"}, "MIXED_PRECISION"),
        ({**MODELOPT, "group_size": 32}, "group_size"),
        ({"quant_method": "fp8", "weight_block_size": [64, 64]}, "[128, 128]"),
        ({"quant_method": "gptq", "bits": 8, "group_size": 128}, "bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": -1}, "group_size"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": {"+:x": {"bits": 8}}}, "+:x"),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {
            "g": {"weights": {"num_bits": 8, "type": "int"}}}}, "config_groups.g.weights"),
        ({"quant_method": "compressed-tensors", "transform_config": {"R1": 1}, "config_groups": {
            "g": {"format": "nvfp4-pack-quantized", "weights": {"num_bits": 4, "type": "float"}}}}, "transform_config"),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_refused_with_what_can(claim: Config, fragment: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(claim)
    assert fragment in str(caught.value)


def _both(one: Config, other: Config) -> Any:
    return interpret(config("mixtral", quantization_config=one), {"quantization": other})


@pytest.mark.parametrize(
    ("other", "fragments"),
    [
        ({"quant_algo": "FP8"}, ["nvfp4", "fp8-tensor"]),
        ({"quant_algo": "NVFP4", "kv_cache_quant_algo": "NVFP4"}, ["key-value cache", "fp8", "nvfp4"]),
    ],
)
def test_two_files_with_different_claims_are_refused(other: Config, fragments: list[str]) -> None:
    one = {**MODELOPT, "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    with pytest.raises(ConfigError) as caught:
        _both(one, other)
    for fragment in ("config.json: quantization_config", "hf_quant_config.json: quantization", *fragments):
        assert fragment in str(caught.value)


def test_two_files_may_differ_in_exceptions_and_complete_each_other() -> None:
    reading = _both({**MODELOPT, "ignore": ["a"]}, {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8",
                                                   "exclude_modules": ["a", "mtp*"]})  # fmt: skip
    assert (reading.spec.quant.ignore, reading.spec.quant.kv_cache) == (("a",), "fp8")
    assert any("mtp*" in note for note in reading.notes)
