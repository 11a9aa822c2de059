"""Inventories of directories, lone configs and names: one answer from each, quickly; one report of all faults."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from configs import config
from sparse import write_sparse

from muster.checkpoint import presets
from muster.checkpoint.config import interpret
from muster.checkpoint.inventory import Inventory
from muster.checkpoint.kinds import Kind
from muster.checkpoint.loader import Loader
from muster.checkpoint.storage import Layout, TensorHeader, headers
from muster.errors import CheckpointError, ConfigError, InputError, MusterError, UsageError

NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["lm_head", "*.self_attn*", "mtp*"],
}


def checkpoint(directory: Path, made: dict[str, Any], **layout: Any) -> Path:
    """A directory that holds exactly what its config claims."""
    spec = interpret(made).spec
    usual = Layout.usual(spec)
    return write_sparse(directory, made, headers(spec, Layout(**{**vars(usual), **layout})), shard=200_000)


FAMILIES = {
    "qwen3_moe": {},
    "qwen3_moe nvfp4": {"quantization_config": NVFP4},
    "qwen3_5_moe": {},
    "qwen3_next": {},
    "glm_moe_dsa fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}},
    "deepseek_v3": {},
    "gpt_oss": {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}},
    "minimax_m2": {},
}


@pytest.mark.parametrize("case", FAMILIES)
def test_headers_and_claim_give_the_same_modules(tmp_path: Path, case: str) -> None:
    made = config(case.partition(" ")[0]) | FAMILIES[case]
    if case.startswith("gpt_oss"):
        made |= {"hidden_size": 64, "intermediate_size": 64}
    directory = checkpoint(tmp_path / "model", made)
    stored, claimed = Inventory.of(str(directory)), Inventory.of(str(directory / "config.json"))
    assert (stored.source, claimed.source) == ("files", "config")
    assert dict(stored.modules) == dict(claimed.modules)
    assert stored.disagreements == ()
    assert stored.nbytes == sum(path.stat().st_size for path in directory.glob("*.safetensors")) - headers_of(directory)


def headers_of(directory: Path) -> int:
    """Bytes of the headers of all files."""
    return sum(8 + int.from_bytes(path.read_bytes()[:8], "little") for path in directory.glob("*.safetensors"))


def test_groups_add_up_and_draft_comes_last(tmp_path: Path) -> None:
    inventory = Inventory.of(str(checkpoint(tmp_path / "model", config("qwen3_5_moe"))))
    groups = inventory.groups
    assert sum(group.nbytes for group in groups) == inventory.nbytes
    assert sum(group.tensors for group in groups) == inventory.tensors
    assert sum(group.parameters for group in groups) == inventory.parameters
    assert [group.draft for group in groups] == sorted(group.draft for group in groups)
    assert {Kind.ROUTED, Kind.SHARED, Kind.DELTA, Kind.ATTENTION, Kind.ROUTER, Kind.VISION} <= {g.kind for g in groups}
    assert inventory.draft_layers == (4,)
    assert {module.layer for module in inventory.layer(4)} == {4}


def test_a_declared_draft_layer_that_is_not_there_is_not_counted(tmp_path: Path) -> None:
    inventory = Inventory.of(str(checkpoint(tmp_path / "model", config("glm4_moe"), draft_layers=0)))
    assert (inventory.spec.draft_layers, inventory.draft_layers) == (1, ())


def test_experts_stored_unlike_are_told_apart(tmp_path: Path) -> None:
    made = config("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    claim = NVFP4 | {"ignore": [*NVFP4["ignore"], "*.experts.0.*", "*.experts.3.*"]}
    directory = checkpoint(tmp_path / "model", made | {"quantization_config": claim})
    inventory = Inventory.of(str(directory))
    layer = {module.name: module for module in inventory.layer(1) if module.kind is Kind.ROUTED}
    experts = "model.layers.1.mlp.experts"
    plain, packed = layer[f"{experts}.{{0,3}}.up_proj"], layer[f"{experts}.{{1-2,4-7}}.up_proj"]
    assert (plain.count, plain.stored, plain.scheme) == (2, "bf16", "W16A16")
    assert (packed.count, packed.stored, packed.scheme, packed.tensors) == (6, "nvfp4", "W4A4", 24)


def test_four_bit_inputs_need_their_scales_in_the_files(tmp_path: Path) -> None:
    made = config("qwen3_moe", hidden_size=64, moe_intermediate_size=64) | {"quantization_config": NVFP4}
    spec = interpret(made).spec
    kept = [header for header in headers(spec, Layout()) if not header.name.endswith(".input_scale")]
    inventory = Inventory.of(str(write_sparse(tmp_path / "model", made, kept)))
    assert {module.scheme for module in inventory.modules.values() if module.stored == "nvfp4"} == {"W4A16"}
    assert "quantised inputs claimed for model.layers.{0-3}.mlp.experts" in inventory.notes[-1]


def test_a_lone_config_takes_the_claim_beside_it(tmp_path: Path) -> None:
    claim = {"quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head", "*.self_attn*"]}}
    made = config("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    (tmp_path / "config.json").write_text(json.dumps(made))
    assert {m.stored for m in Inventory.of(str(tmp_path)).modules.values()} == {"bf16"}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(claim))
    for model in (tmp_path, tmp_path / "config.json"):
        inventory = Inventory.of(str(model))
        assert inventory.source == "config"
        assert {m.stored for m in inventory.modules.values() if m.kind is Kind.ROUTED} == {"nvfp4"}
        assert "no weights were read" in inventory.notes[0]


def test_an_unknown_model_is_refused_with_the_names_like_it() -> None:
    with pytest.raises(
        UsageError, match=r"no such directory, file or released checkpoint[\s\S]*did you mean .*gpt-oss-120b"
    ):
        Inventory.of("gpt-oss-120")


def test_an_unknown_architecture_is_refused_with_what_was_recognised(tmp_path: Path) -> None:
    made = config("qwen3_moe", architectures=["FutureMoeForCausalLM"], model_type="future_moe", expert_gates_of_time=3)
    (tmp_path / "config.json").write_text(json.dumps(made))
    with pytest.raises(ConfigError) as caught:
        Inventory.of(str(tmp_path))
    message = str(caught.value)
    assert 'found "FutureMoeForCausalLM", expected one of MixtralForCausalLM (mixtral)' in message
    assert "keys of it are known from other families; not known: expert_gates_of_time" in message


def damaged(directory: Path) -> tuple[Path, str]:
    """A checkpoint with every fault at once: the config's, the index's and four files'."""
    made = config("qwen3_moe", num_experts=8)
    whole = checkpoint(directory, made)
    shards = sorted(whole.glob("*.safetensors"))
    assert len(shards) >= 5
    shards[0].unlink()
    shards[1].write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 4321\n")
    shards[2].write_bytes(shards[2].read_bytes()[:-10])
    index = json.loads((whole / "model.safetensors.index.json").read_text())
    moved = next(name for name, file in index["weight_map"].items() if file == shards[3].name)
    index["weight_map"][moved] = shards[4].name
    (whole / "model.safetensors.index.json").write_text(json.dumps(index))
    (whole / "config.json").write_text(json.dumps(made | {"num_experts": "eight", "rms_norm_eps": None}))
    return whole, moved


@pytest.mark.parametrize("read", [lambda path: Inventory.of(str(path)), Loader.open], ids=["inventory", "loader"])
def test_everything_wrong_with_a_directory_is_in_one_report(tmp_path: Path, read: Any) -> None:
    whole, moved = damaged(tmp_path / "model")
    shards = [f"model-{number:05d}-of-" for number in range(1, 6)]
    with pytest.raises(InputError) as caught:
        read(whole)
    report = str(caught.value)
    expected = [
        ("num_experts: found ", "expected a whole number"),
        ("rms_norm_eps: found nothing",),
        (shards[0], "no such file", "by model.safetensors.index.json"),
        (shards[1], "a Git-LFS pointer", "4,321 bytes"),
        (shards[2], "truncated"),
        (shards[4], f"disagree on {moved}", shards[3]),
    ]
    for fragments in expected:
        assert any(all(part in line for part in fragments) for line in report.splitlines()), f"{fragments} in {report}"


def test_shards_without_an_index_are_read_all_the_same(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "model", config("qwen3_moe"))
    (whole / "model.safetensors.index.json").unlink()
    first = sorted(whole.glob("*.safetensors"))[0]
    first.write_bytes(first.read_bytes()[:-1])
    with pytest.raises(CheckpointError) as caught:
        Inventory.of(str(whole))
    assert "and no index" in str(caught.value)
    assert "truncated" in str(caught.value)


@pytest.mark.parametrize("model", ["a" * 5000, "loop", "config.json/model"])
def test_a_directory_that_the_system_will_not_read_is_a_named_error(tmp_path: Path, model: str) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(MusterError):
        Inventory.of(str(tmp_path / model))
    with pytest.raises(InputError):
        Loader.open(tmp_path / model)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_directory_without_permission_is_a_named_error(tmp_path: Path) -> None:
    whole = checkpoint(tmp_path / "model", config("qwen3_moe"))
    whole.chmod(0)
    try:
        with pytest.raises(CheckpointError, match="Permission denied"):
            Inventory.of(str(whole))
    finally:
        whole.chmod(0o700)


def test_a_pattern_that_is_no_expression_is_found_with_the_config() -> None:
    claim = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["re:(", "re:[z-a]"]}
    with pytest.raises(ConfigError) as caught:
        interpret(config("qwen3_moe", quantization_config=claim, num_experts=-1))
    assert [text in str(caught.value) for text in ("re:(", "re:[z-a]", "num_experts")] == [True] * 3


PROBE = """
import json, sys, time
from pathlib import Path
from statistics import median
start = time.process_time()
from muster.checkpoint.index import CheckpointIndex, collector_at_rest
from muster.checkpoint.inventory import Inventory
imported = time.process_time() - start

def seconds(work):
    before = time.process_time()
    work()
    return time.process_time() - before

def parse():
    with collector_at_rest():
        parsed = [json.loads(text) for text in texts]

directory = Path(sys.argv[1])
tensors = len(CheckpointIndex.open(directory).tensors)
assert Inventory.of(sys.argv[1]).tensors == tensors
peak = int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) * 1024
torch = "torch" in sys.modules
texts = [(directory / "model.safetensors.index.json").read_bytes()]
for path in directory.glob("*.safetensors"):
    with path.open("rb") as stream:
        texts.append(stream.read(int.from_bytes(stream.read(8), "little")))
opened, whole = [], []
for _ in range(3):
    alone = seconds(parse)
    opened.append((imported + seconds(lambda: CheckpointIndex.open(directory))) / alone)
    whole.append(seconds(lambda: Inventory.of(sys.argv[1])) / alone)
print(tensors, median(opened), median(whole), peak, torch)
"""


@pytest.mark.alone
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_headers_of_300_000_tensors_cost_little_beside_their_json_and_600_mb(tmp_path: Path) -> None:
    """Two seconds, and half a second more for the inventory, where the JSON alone takes two thirds of a second.

    Processor time, by its ratio to parsing in the same run: a core that others share slows both alike.
    """
    preset = presets.preset("qwen3.5-397b-a17b-nvfp4")
    first = (header for header in headers(preset.spec, preset.layout) if is_before(header, 49))
    directory = write_sparse(tmp_path / "model", preset.config, first)
    done = subprocess.run([sys.executable, "-c", PROBE, directory], capture_output=True, text=True, check=True)
    tensors, opened, whole, peak, torch = done.stdout.split()
    assert 300_000 <= int(tensors) < 310_000
    assert float(opened) < 3.0
    assert float(whole) < 3.75
    assert int(peak) < 600e6
    assert torch == "False"


def is_before(header: TensorHeader, layer: int) -> bool:
    """Whether a tensor belongs to no decoder layer or to one before `layer`."""
    _, _, tail = header.name.partition("language_model.layers.")
    return not tail or int(tail.partition(".")[0]) < layer
