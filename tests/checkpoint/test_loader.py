"""Loading: the books that must balance, and what they say when they do not."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from expert_files import (
    QWEN3,
    D,
    E,
    F,
    V,
    edit,
    encoded,
    moe_of,
    plain_checkpoint,
    qwen_checkpoint,
    refusal,
    save,
    stacked_nvfp4_checkpoint,
)
from torch import Tensor

from muster.checkpoint.loader import Loader
from muster.checkpoint.names import Names
from muster.errors import CheckpointError, MusterError
from muster.formats.dialects import Dialect

EXPERT = "model.layers.0.mlp.experts"


def test_a_tensor_removed_is_named_with_its_shape(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.weight"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj.weight: found no such tensor, expected shape [{F}, {D}]" in message
    assert "1 problem\n" in message


def test_a_scale_removed_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.weight_scale"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj" in message
    assert "weight_scale" in message


def test_a_tensor_that_nothing_reads_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.mystery": torch.ones(1)}))
    message = refusal(tmp_path)
    assert "model.layers.0.mlp.mystery: found it in the files, expected a use for it, or a waiver by name" in message


def test_a_tensor_renamed_is_named_under_both_names(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)

    def rename(tensors: dict[str, Tensor]) -> None:
        tensors[f"{EXPERT}.1.down.weight"] = tensors.pop(f"{EXPERT}.1.down_proj.weight")

    edit(tmp_path, rename)
    message = refusal(tmp_path)
    assert f"{EXPERT}.1.down_proj.weight: found no such tensor" in message
    assert f"{EXPERT}.1.down.weight: found it in the files" in message


def test_a_wrong_shape_of_one_expert_is_named_with_the_shape_of_the_others(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    wrong = torch.ones(F, D // 2).bfloat16()
    edit(tmp_path, lambda tensors: tensors.update({f"{EXPERT}.3.gate_proj.weight": wrong}))
    assert f"{EXPERT}.3.gate_proj.weight: found BF16 [{F}, {D // 2}], expected BF16 [{F}, {D}]" in refusal(tmp_path)


def test_a_wrong_shape_of_all_experts_is_named_with_the_models(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"moe_intermediate_size": 2 * F}))
    message = refusal(tmp_path)
    assert f"{EXPERT}.*.gate_proj" in message
    assert f"[{E}, {2 * F}, {D}]" in message


def test_a_wrong_shape_of_a_single_tensor_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.gate.weight": torch.ones(E + 1, D)}))
    message = refusal(tmp_path)
    assert f"model.layers.0.mlp.gate.weight: found shape [{E + 1}, {D}], expected shape [{E}, {D}]" in message


def test_a_quantised_tensor_where_a_plain_one_must_be_is_named(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    router = torch.ones(E, D).to(torch.float8_e5m2)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.mlp.gate.e_score_correction_bias": router[0, :E]}))
    loader = Loader.open(tmp_path)
    moe = moe_of(loader)
    loader.router(0, replace(moe, routing=replace(moe.routing, selection_bias=True)))
    loader.experts(0, moe)
    with pytest.raises(CheckpointError, match="bias: found dtype F8_E5M2, expected BF16 or F16 or F32"):
        loader.finish()


def test_stacked_codes_of_too_few_rows_are_named(tmp_path: Path) -> None:
    stacked_nvfp4_checkpoint(tmp_path, (E, 2))
    name = "model.layers.0.mlp.experts.gate_up_proj"
    codes = torch.ones(E, 1, D // 2, dtype=torch.uint8)
    edit(tmp_path, lambda tensors: tensors.update({name: codes}))
    assert f"{name}" in refusal(tmp_path)


def test_experts_in_two_dialects_are_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)

    def unquantise(tensors: dict[str, Tensor]) -> None:
        for part in ("weight", "weight_scale", "weight_scale_2"):
            del tensors[f"{EXPERT}.1.gate_proj.{part}"]
        tensors[f"{EXPERT}.1.gate_proj.weight"] = torch.ones(F, D).bfloat16()

    edit(tmp_path, unquantise)
    message = refusal(tmp_path)
    assert f"{EXPERT}.1.gate_proj" in message
    assert "modelopt-nvfp4" in message


def test_a_bad_scale_is_named_with_its_expert(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.MODELOPT_NVFP4), Dialect.MODELOPT_NVFP4)
    edit(tmp_path, lambda tensors: tensors[f"{EXPERT}.2.up_proj.weight_scale_2"].fill_(torch.inf))
    message = refusal(tmp_path)
    assert f"{EXPERT}.*.up_proj.weight_scale_2: found 1 infinite" in message
    assert "in experts 2" in message
    assert ": found 1 problem\n" in message


def test_an_int4_shape_unlike_the_others_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.CT_INT4), Dialect.CT_INT4)
    edit(tmp_path, lambda tensors: tensors[f"{EXPERT}.2.up_proj.weight_shape"].fill_(7))
    assert f"{EXPERT}.2.up_proj.weight_shape: found [7, 7], expected [{F}, {D}]" in refusal(tmp_path)


def test_a_part_that_only_some_experts_have_is_named(tmp_path: Path) -> None:
    qwen_checkpoint(tmp_path, encoded(Dialect.GPTQ), Dialect.GPTQ)
    edit(tmp_path, lambda tensors: tensors.pop(f"{EXPERT}.2.up_proj.g_idx"))
    message = refusal(tmp_path)
    assert f"{EXPERT}.2.up_proj.g_idx: found no such tensor, expected it, as other experts have it" in message


def test_many_tensors_are_grouped_and_none_is_left_out(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    extra = {f"model.layers.{i}.mlp.experts.{e}.w9.weight": torch.ones(1) for i in range(7) for e in (0, 1, 2, 5)}
    edit(tmp_path, lambda tensors: tensors.update(extra))
    assert "model.layers.{0-6}.mlp.experts.{0-2,5}.w9.weight (28 tensors)" in refusal(tmp_path)


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)

    def spoil(tensors: dict[str, Tensor]) -> None:
        del tensors[f"{EXPERT}.0.gate_proj.weight"]
        tensors["model.layers.0.mlp.gate.weight"] = torch.ones(1, 1)
        tensors["stray.weight"] = torch.ones(3)

    edit(tmp_path, spoil)
    message = refusal(tmp_path)
    for part in ("0.gate_proj.weight", "gate.weight: found shape [1, 1]", "stray.weight"):
        assert part in message
    assert "3 problems" in message


def test_what_is_wrong_stands_as_nan_and_the_loader_says_it_is_not_sound(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    loader = Loader.open(tmp_path)
    assert loader.sound
    matrix = loader.matrix("model.layers.0.self_attn.q_proj", (16, 8))
    assert not loader.sound
    assert matrix.shape == (16, 8)
    assert bool(matrix.codes.isnan().all())
    with pytest.raises(CheckpointError, match=r"q_proj\.weight: found no such tensor, expected shape \[16, 8\]"):
        loader.finish()


def test_waived_tensors_are_listed_with_their_reason(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    extra = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
        "model.layers.0.self_attn.k_proj.k_scale": torch.tensor(1.0),
        "lora.a": torch.ones(1),
    }
    edit(tmp_path, lambda tensors: tensors.update(extra))
    loader = Loader.open(tmp_path)
    loader.waive("lora.*", "adapters are not run")
    loader.router(0, moe_of(loader))
    loader.experts(0, moe_of(loader))
    waived = loader.finish().waived
    assert waived["adapters are not run"] == ("lora.a",)
    assert {name for names in waived.values() for name in names} == set(extra)


def test_draft_layers_are_waived_only_while_no_draft_is_run(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    spec = replace(Loader.open(tmp_path).spec, family="deepseek_v3", draft_layers=1)
    names = Names(spec)
    assert names.layer(1) == "model.layers.1"
    idle = {waiver.pattern for waiver in names.waivers(draft=False)}
    running = {waiver.pattern for waiver in names.waivers(draft=True)}
    assert idle - running == {"model.layers.1.*"}
    assert {"model.layers.1.embed_tokens.weight", "model.layers.1.shared_head.head.weight"} <= running
    qwen = Names(replace(spec, family="qwen3_next"))
    assert qwen.layer(1) == "mtp.layers.0"
    assert "mtp.*" in {waiver.pattern for waiver in qwen.waivers(draft=False)}


@pytest.mark.parametrize("stored", ["no head", "the same head", "another head"])
def test_a_tied_head_is_the_embedding_and_a_stored_one_must_equal_it(tmp_path: Path, stored: str) -> None:
    embedding = torch.randn(V, D).bfloat16()
    tensors = {"model.embed_tokens.weight": embedding}
    if stored != "no head":
        tensors["lm_head.weight"] = embedding + (stored == "another head")
    save(tmp_path, QWEN3 | {"tie_word_embeddings": True}, tensors)
    loader = Loader.open(tmp_path)
    assert torch.equal(loader.embedding(), embedding)
    assert torch.equal(loader.head().codes, embedding)
    if stored == "another head":
        with pytest.raises(CheckpointError, match=r"lm_head.weight: found values other than model.embed_tokens.weight"):
            loader.finish()
    else:
        assert loader.finish().consumed == 1


def test_progress_runs_to_the_bytes_of_all_tensors(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    loader = Loader.open(tmp_path, progress=lambda done, total: seen.append((done, total)))
    loader.router(0, moe_of(loader))
    loader.experts(0, moe_of(loader))
    assert seen[-1] == (loader.index.nbytes, loader.index.nbytes)


def test_a_missing_config_is_an_input_error_too(tmp_path: Path) -> None:
    plain_checkpoint(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(MusterError) as caught:
        Loader.open(tmp_path)
    assert caught.value.exit_code == 2


PEAK = """
import pathlib, resource, sys, torch
from muster.checkpoint.loader import Loader
def resident(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) << 10
loader = Loader.open(pathlib.Path(sys.argv[1]))
before = resident("VmRSS")
layers = [loader.experts(i, layer.feed_forward) for i, layer in enumerate(loader.spec.layers)]
print(resident("VmHWM") - before, sum(e.gate_up.nbytes + e.down.nbytes for e in layers), loader.index.nbytes)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_loading_peaks_little_above_the_weights_it_returns(tmp_path: Path) -> None:
    layers, inner, hidden = 16, 512, 512
    config = QWEN3 | {"num_hidden_layers": layers, "hidden_size": hidden, "moe_intermediate_size": inner}
    shapes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {
        f"model.layers.{i}.mlp.experts.{e}.{part}.weight": torch.zeros(shape, dtype=torch.bfloat16)
        for i in range(layers)
        for e in range(E)
        for part, shape in shapes.items()
    }
    save(tmp_path, config, tensors)
    done = subprocess.run([sys.executable, "-c", PEAK, tmp_path], capture_output=True, text=True, check=True)
    peak, resident, checkpoint = map(int, done.stdout.split())
    assert resident == checkpoint
    assert peak < 1.3 * checkpoint, f"peak {peak / 2**20:.0f} MiB for {checkpoint / 2**20:.0f} MiB"
