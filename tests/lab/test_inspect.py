"""`muster inspect` as a stranger meets it: real processes, real directories, broken ones too."""

import json
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from muster.checkpoint.inventory import Inventory
from muster.lab.explain.drafting import Drafting
from muster.lab.explain.inspection import Inspection, routing_words
from muster.lab.explain.machine import COUNTS
from muster.lab.explain.memory import Load

CONFIG = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e6,
    "torch_dtype": "float32",
}


def muster(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "muster.cli", *arguments], capture_output=True, text=True, timeout=120)


def tensors() -> dict[str, np.ndarray]:
    shapes = {"model.embed_tokens.weight": (64, 32), "lm_head.weight": (64, 32), "model.norm.weight": (32,)}
    for layer in range(2):
        root = f"model.layers.{layer}"
        shapes |= {f"{root}.{norm}.weight": (32,) for norm in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{root}.self_attn.{part}_proj.weight": (32, 32) for part in "qo"}
        shapes |= {f"{root}.self_attn.{part}_proj.weight": (16, 32) for part in "kv"}
        shapes[f"{root}.block_sparse_moe.gate.weight"] = (4, 32)
        for expert in range(4):
            experts = f"{root}.block_sparse_moe.experts.{expert}"
            shapes |= {
                f"{experts}.w1.weight": (16, 32),
                f"{experts}.w3.weight": (16, 32),
                f"{experts}.w2.weight": (32, 16),
            }
    return {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A tiny checkpoint in three shards."""
    names = sorted(tensors())
    files = {name: f"model-{number % 3 + 1:05}-of-00003.safetensors" for number, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors()[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_whole_checkpoint_is_told_from_its_headers(sharded: Path) -> None:
    result = muster("inspect", str(sharded), "--memory", "8", "--json")
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    every = sum(array.size for array in tensors().values())
    assert found["source"] == "files"
    assert found["parameters"]["decoder"] == found["parameters"]["all"] == every
    assert found["bytes"] == 4 * every
    # Two of four experts of three 16 x 32 matrices in two layers are not used, nor is the embedding.
    assert found["parameters"]["active"] == every - 2 * 2 * 3 * 16 * 32 - 64 * 32
    assert found["memory"]["fits"]


def test_everything_wrong_with_a_directory_is_in_one_report_with_exit_code_one(sharded: Path) -> None:
    missing, pointer, cut = sorted(sharded.glob("*.safetensors"))
    missing.unlink()
    pointer.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4321\n")
    cut.write_bytes(cut.read_bytes()[:-100])
    result = muster("inspect", str(sharded))
    assert result.returncode == 1
    assert all(path.name in result.stdout for path in (missing, pointer, cut))
    assert "LFS" in result.stdout
    assert "Traceback" not in result.stderr
    document = muster("inspect", str(sharded), "--json")
    assert document.returncode == 1
    problems = json.loads(document.stdout)["problems"]
    assert len(problems) >= 3
    assert all(problem["thing"] and problem["found"] for problem in problems)


def test_an_index_that_disagrees_with_its_files_is_reported(sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = content["weight_map"]["lm_head.weight"]
    content["weight_map"]["model.surprise.weight"] = content["weight_map"]["lm_head.weight"]
    index.write_text(json.dumps(content))
    result = muster("inspect", str(sharded))
    assert result.returncode == 1
    assert "model.surprise.weight" in result.stdout


def test_an_unknown_model_is_bad_usage_with_near_names() -> None:
    result = muster("inspect", "qwen3.5-397b-nvfp4")
    assert result.returncode == 2
    assert result.stdout == ""
    assert "qwen3.5-397b-a17b-nvfp4" in result.stderr


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["NovelForCausalLM"]}))
    result = muster("inspect", str(tmp_path / "config.json"))
    assert result.returncode == 1
    assert "NovelForCausalLM" in result.stdout


def test_gpu_and_memory_exclude_each_other() -> None:
    result = muster("inspect", "gpt-oss-20b", "--gpu", "h200", "--memory", "80")
    assert result.returncode == 2
    assert "--memory" in result.stderr


def test_a_stranger_learns_all_of_the_397b_model_from_one_command() -> None:
    result = muster("inspect", "qwen3.5-397b-a17b-nvfp4")
    assert result.returncode == 0, result.stderr
    text = result.stdout
    assert "NVFP4 W4A4" in text
    assert "81 % of it BF16" in text
    assert "MTP: 1 layer at mtp.*, BF16, 512 experts" in text
    row = next(line for line in text.splitlines() if line.strip().startswith("H200 "))
    assert row.split()[3] == "-", "one H200 is too small"
    assert "tok/s" in text
    assert "attention projections" in text
    assert "flashinfer_cutlass" in text


def test_machines_are_answered_with_memory_limit_and_every_backend() -> None:
    result = muster("inspect", "qwen3.5-397b-a17b-nvfp4", "--gpu", "2xh200,8xrtx-pro-6000", "--json")
    assert result.returncode == 0, result.stderr
    h200, pro = json.loads(result.stdout)["machines"]
    assert h200["fits"]
    assert pro["fits"]
    parts = ("weights", "draft", "cache", "workspace")
    assert sum(h200[part] for part in parts) <= h200["budget"]
    experts, draft = h200["backends"]
    refused = [offer for offer in experts["offers"] if offer["reasons"]]
    assert {offer["backend"] for offer in refused} >= {"flashinfer_trtllm", "flashinfer_cutedsl"}
    assert all(offer["scheme"] for offer in experts["offers"] if not offer["reasons"])
    assert "draft" in draft["part"]


@pytest.mark.parametrize("options", [["--json"], ["--memory", "141"], ["--memory", "141", "--json"]])
def test_nothing_but_the_question_for_backends_needs_torch(options: list[str]) -> None:
    code = (
        "import sys; from muster.cli import app\n"
        f"try: app(['inspect', 'qwen3.5-397b-a17b-nvfp4', *{options!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    start = time.process_time()
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    assert time.process_time() - start < 2


def test_the_roofline_of_a_known_gpu_needs_no_torch() -> None:
    code = (
        "import sys; from muster.cli import app\n"
        "try: app(['roofline', 'glm-5-nvfp4', '--gpu', '8xrtx-pro-6000'])\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.mark.parametrize(
    ("name", "declared", "there", "words"),
    [
        ("qwen3.5-397b-a17b-nvfp4", 1, (60,), "mtp.*"),
        ("glm-5-nvfp4", 1, (78,), "model.layers.78.*"),
        ("gpt-oss-120b", 0, (), "none"),
        ("minimax-m2.5", 3, (), "none stored, though the config declares 3"),
        ("qwen3-next-80b-a3b", 0, (48,), "not declared"),
    ],
)
def test_draft_layers_are_found_by_what_is_stored(name: str, declared: int, there: tuple[int, ...], words: str) -> None:
    found = Drafting.of(Inventory.of(name))
    assert (found.declared, found.layers) == (declared, there)
    assert words in found.text()


def test_repeated_tables_of_a_draft_layer_are_told() -> None:
    assert Drafting.of(Inventory.of("deepseek-v3")).copies == 2 * 129_280 * 7_168 * 2
    assert Drafting.of(Inventory.of("glm-5")).copies == 0


def test_groups_account_for_every_byte() -> None:
    for name in ("qwen3.5-397b-a17b-nvfp4", "deepseek-v3", "gpt-oss-120b"):
        inspection = Inspection(Inventory.of(name), Load())
        assert sum(group.nbytes for group in inspection.groups) == inspection.inventory.nbytes
        assert sum(group.tensors for group in inspection.groups) == inspection.inventory.tensors


def test_a_fit_on_more_gpus_of_a_kind_has_more_room() -> None:
    for _, several in Inspection(Inventory.of("gpt-oss-120b"), Load()).fits():
        assert len(several) == len(COUNTS)
        rooms = [fit.tokens or 0 for fit in several if fit is not None]
        assert rooms == sorted(rooms)


def test_routing_rules_are_told_in_words() -> None:
    rules = {}
    for name in ("deepseek-v3", "gpt-oss-120b", "olmoe-1b-7b"):
        experts = Inspection(Inventory.of(name), Load()).experts
        assert experts is not None
        rules[name] = routing_words(experts.routing)
    assert "from the best 4 of 8 groups" in rules["deepseek-v3"]
    assert "times 2.5" in rules["deepseek-v3"]
    assert rules["gpt-oss-120b"] == "top 4 of the logits, softmax over those"
    assert rules["olmoe-1b-7b"] == "softmax over all, top 8, not renormalised"
