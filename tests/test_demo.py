"""The demo checkpoints: what they are said to be, checked with transformers on the real weights."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from muster import LLM, SamplingParams
from muster.checkpoint.index import CheckpointIndex
from muster.lab.build.demo import EXPERTS, Source, write_demo

QUESTION = [{"role": "user", "content": "Why is the sky blue? Answer in two sentences."}]


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("demo")
    write_demo(directory)
    return directory


@pytest.fixture(scope="module")
def mixtral(demo: Path) -> Iterator[torch.nn.Module]:
    from transformers import AutoModelForCausalLM

    with torch.inference_mode():
        yield AutoModelForCausalLM.from_pretrained(demo / "bf16", dtype=torch.float32)


def test_the_experts_compute_the_dense_model(demo: Path, mixtral: torch.nn.Module) -> None:
    """A Llama with the same bf16 weights and whole feed-forward layers gives the same logits to float32 rounding."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = json.loads((demo / "bf16" / "config.json").read_text())
    width = config["intermediate_size"] * EXPERTS
    dense = LlamaForCausalLM(
        LlamaConfig(
            **{k: config[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")},
            **{k: config[k] for k in ("num_key_value_heads", "rms_norm_eps", "max_position_embeddings")},
            intermediate_size=width,
            tie_word_embeddings=True,
            rope_parameters={"rope_type": "default", "rope_theta": config["rope_theta"]},
        )
    ).float()
    index = CheckpointIndex.open(demo / "bf16")
    state = {name: index.read(name).float() for name in index.tensors if "block_sparse_moe" not in name}
    for layer in range(config["num_hidden_layers"]):
        for ours, theirs, axis, factor in (("w1", "gate", 0, 1), ("w3", "up", 0, 1), ("w2", "down", 1, EXPERTS)):
            prefix = f"model.layers.{layer}.block_sparse_moe.experts"
            pieces = [index.read(f"{prefix}.{expert}.{ours}.weight").float() for expert in range(EXPERTS)]
            state[f"model.layers.{layer}.mlp.{theirs}_proj.weight"] = torch.cat(pieces, axis) / factor
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    dense.load_state_dict(state, strict=True)

    ids = torch.randint(100, 49_000, (1, 48), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        expected, found = dense(ids).logits, mixtral(ids).logits
    assert (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt() < 1e-5


def test_the_greedy_continuation_equals_transformers_token_for_token(demo: Path, mixtral: torch.nn.Module) -> None:
    llm = LLM(demo / "bf16", unproven=True)
    prompt = llm.tokenizer.chat(QUESTION)
    with torch.inference_mode():
        expected = mixtral.generate(torch.tensor([prompt]), max_new_tokens=64, do_sample=False)[0, len(prompt) :]
    [answer] = llm.generate([prompt], SamplingParams(max_tokens=64))
    assert list(answer.token_ids) == expected.tolist()


def test_the_nvfp4_checkpoint_answers_in_english(demo: Path) -> None:
    answer = LLM(demo / "nvfp4").chat(QUESTION, SamplingParams(max_tokens=64))
    assert "sky" in answer.text
    assert any(word in answer.text for word in ("blue", "light", "scatter", "atmosphere"))


def test_the_nvfp4_checkpoint_is_smaller_by_what_its_experts_save(demo: Path) -> None:
    bf16, nvfp4 = (CheckpointIndex.open(demo / name) for name in ("bf16", "nvfp4"))
    experts = sum(e.end - e.begin for name, e in bf16.tensors.items() if ".experts." in name)
    quantised = sum(e.end - e.begin for name, e in nvfp4.tensors.items() if ".experts." in name)
    # 4.5 bits instead of 16, plus one float32 scale per matrix.
    assert quantised == pytest.approx(experts * 4.5 / 16, rel=1e-3)
    others = [sum(e.end - e.begin for n, e in i.tensors.items() if ".experts." not in n) for i in (bf16, nvfp4)]
    assert others[0] == others[1]


def test_writing_again_rewrites_no_weights_and_changes_no_byte(demo: Path) -> None:
    def shards() -> dict[Path, int]:
        return {path: path.stat().st_mtime_ns for path in demo.rglob("*.safetensors")}

    def contents() -> dict[Path, bytes]:
        small = (path for path in demo.rglob("*") if path.is_file() and path.suffix != ".safetensors")
        return {path: path.read_bytes() for path in small}

    before = shards(), contents()
    write_demo(demo)
    assert (shards(), contents()) == before


def test_run_prints_the_answer_on_stdout_and_the_figures_on_stderr(demo: Path) -> None:
    command = [sys.executable, "-m", "muster.cli", "run", str(demo / "nvfp4"), "-p", "Say hello.", "--max-tokens", "8"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()
    assert "tok/s" in result.stderr
    assert "tok/s" not in result.stdout


def test_run_with_json_prints_one_document(demo: Path) -> None:
    command = [sys.executable, "-m", "muster.cli", "run", str(demo / "nvfp4"), "-p", "Say hello.", "--json"]
    result = subprocess.run([*command, "--max-tokens", "8"], capture_output=True, text=True, timeout=120)
    document = json.loads(result.stdout)
    assert document["completion_tokens"] == len(document["token_ids"])
    assert document["moe_backends"]


def test_the_source_is_what_the_docs_say() -> None:
    assert Source.open().value("general.license") == "apache-2.0"
