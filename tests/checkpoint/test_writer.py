"""`quantize` and the writer under it: what is written decodes as it was encoded, and interrupted work ends the same."""

import json
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from muster.checkpoint.config import read_spec
from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.loader import Loader
from muster.checkpoint.quant import survey
from muster.checkpoint.writer import STATE_NAME
from muster.errors import CheckpointError, EnvironmentLackError, FormatError, UsageError
from muster.formats.codec import decode, encode
from muster.formats.dialects import Dialect, read
from muster.formats.matrix import Meaning
from muster.formats.spec import FP8_BLOCK, MXFP4, NVFP4
from muster.lab.build.quantize import quantize
from muster.lab.build.recipes import RECIPES

SHARD = 100_000
"""Small enough for several shards of the tiny models."""

SIZES = {
    "vocab_size": 64,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
}
ENCODINGS = {
    "nvfp4": (NVFP4, Meaning.MULTIPLIES, Dialect.MODELOPT_NVFP4),
    "nvfp4-ct": (NVFP4, Meaning.DIVIDES, Dialect.CT_NVFP4),
    "mxfp4": (MXFP4, Meaning.MULTIPLIES, Dialect.CT_MXFP4),
    "fp8-block": (FP8_BLOCK, Meaning.MULTIPLIES, Dialect.FP8_BLOCK),
}


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[str, Path]:
    torch.manual_seed(0)
    root = tmp_path_factory.mktemp("sources")
    mixtral = MixtralForCausalLM(
        MixtralConfig(**SIZES, intermediate_size=128, num_local_experts=4, num_experts_per_tok=2)
    )
    qwen = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **SIZES, intermediate_size=256, moe_intermediate_size=128, num_experts=4, num_experts_per_tok=2,
            mlp_only_layers=[0],
        )
    )  # fmt: skip
    for name, model in (("mixtral", mixtral), ("qwen3_moe", qwen)):
        model.to(torch.bfloat16).save_pretrained(root / name)
        (root / name / "tokenizer.json").write_text('{"version": "1.0"}')
    return {"mixtral": root / "mixtral", "qwen3_moe": root / "qwen3_moe", "stacked": stack_experts(root)}


def stack_experts(root: Path) -> Path:
    """The Qwen3 model with its experts in one tensor per layer, as newer releases store them."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(root / "qwen3_moe" / "model.safetensors")
    experts = "model.layers.1.mlp.experts"
    parts = {
        part: torch.stack([tensors.pop(f"{experts}.{e}.{part}.weight") for e in range(4)])
        for part in ("gate_proj", "up_proj", "down_proj")
    }
    tensors[f"{experts}.gate_up_proj"] = torch.cat((parts["gate_proj"], parts["up_proj"]), dim=1)
    tensors[f"{experts}.down_proj"] = parts["down_proj"].contiguous()
    target = root / "stacked"
    target.mkdir()
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((root / "qwen3_moe" / "config.json").read_bytes())
    return target


def files(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir())}


def original(source: Path, module: str) -> torch.Tensor:
    return CheckpointIndex.open(source).read(f"{module}.weight")


@pytest.mark.parametrize("linears", [False, True], ids=["experts", "linears"])
@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_every_tensor_is_the_original_or_its_encoding(sources, tmp_path, model, format, linears):
    summary = quantize(sources[model], format, tmp_path / "out", linears=linears, shard_bytes=SHARD)
    before, after = CheckpointIndex.open(sources[model]), CheckpointIndex.open(tmp_path / "out")
    stored = survey(after, read_spec(tmp_path / "out"))
    assert stored.disagreements == ()

    encoding, meaning, dialect = ENCODINGS[format]
    quantised = {name for name, module in stored.modules.items() if module.dialect is not Dialect.PLAIN}
    assert len(quantised) == summary.matrices
    for name in quantised:
        module = stored.modules[name]
        assert (module.dialect, module.format) == (dialect, encoding)
        parts = {part: after.read(tensor) for part, tensor in module.parts.items()}
        expected = encode(original(sources[model], name), encoding, tensor_scale=meaning)
        assert torch.equal(decode(read(dialect, parts, module.shape, name)), decode(expected)), name

    spelled = {tensor for name in quantised for tensor in stored.modules[name].parts.values()}
    assert after.tensors.keys() - spelled == before.tensors.keys() - {f"{name}.weight" for name in quantised}
    for name in after.tensors.keys() - spelled:
        assert torch.equal(after.read(name), before.read(name)), name


def expected_modules(model: str, linears: bool) -> set[str]:
    layers = (0, 1) if model == "mixtral" else (1,)
    block, parts = ("block_sparse_moe", ("w1", "w2", "w3")), ("gate_proj", "up_proj", "down_proj")
    home, matrices = block if model == "mixtral" else ("mlp", parts)
    modules = {f"model.layers.{n}.{home}.experts.{e}.{part}" for n in layers for e in range(4) for part in matrices}
    if linears:
        modules |= {f"model.layers.{n}.self_attn.{part}_proj" for n in (0, 1) for part in "qkvo"}
        modules |= {f"model.layers.0.mlp.{part}" for part in parts} if model != "mixtral" else set()
    return modules


@pytest.mark.parametrize("linears", [False, True], ids=["experts", "linears"])
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_exactly_the_experts_and_on_request_the_linears_are_quantised(sources, tmp_path, model, linears):
    quantize(sources[model], "nvfp4", tmp_path / "out", linears=linears)
    tensors = CheckpointIndex.open(tmp_path / "out").tensors
    found = {name.removesuffix(".weight_scale_2") for name in tensors if name.endswith(".weight_scale_2")}
    assert found == expected_modules(model, linears)


@pytest.mark.parametrize("format", RECIPES)
def test_stacked_experts_are_written_one_by_one(sources, tmp_path, format):
    quantize(sources["stacked"], format, tmp_path / "a", shard_bytes=SHARD)
    quantize(sources["qwen3_moe"], format, tmp_path / "b", shard_bytes=SHARD)
    stacked, single = CheckpointIndex.open(tmp_path / "a"), CheckpointIndex.open(tmp_path / "b")
    assert stacked.tensors.keys() == single.tensors.keys()
    for name in single.tensors:
        assert torch.equal(
            stacked.read(name).flatten().view(torch.uint8), single.read(name).flatten().view(torch.uint8)
        )


@pytest.mark.parametrize("format", RECIPES)
@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_the_loader_takes_the_experts_with_each_ones_tensor_scale(sources, tmp_path, model, format):
    quantize(sources[model], format, tmp_path / "out", shard_bytes=SHARD)
    loader = Loader.open(tmp_path / "out")
    experts = loader.experts(1, loader.spec.layers[1].feed_forward)
    encoding, meaning, _ = ENCODINGS[format]
    home = "block_sparse_moe" if model == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if model == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    for expert in range(4):
        module = f"model.layers.1.{home}.experts.{expert}"

        def expected(part, module=module):
            return decode(encode(original(sources[model], f"{module}.{part}"), encoding, tensor_scale=meaning))

        assert torch.equal(decode(experts.gate_up[expert]), torch.cat((expected(gate), expected(up))))
        assert torch.equal(decode(experts.down[expert]), expected(down))


@pytest.mark.parametrize("format", RECIPES)
def test_other_tools_read_the_files(sources, tmp_path, format):
    out = tmp_path / "out"
    summary = quantize(sources["mixtral"], format, out, shard_bytes=SHARD)
    config = AutoConfig.from_pretrained(out)
    assert config.model_type == "mixtral"
    claim = config.quantization_config
    assert claim == RECIPES[format].config(claim.get("ignore") or claim["modules_to_not_convert"])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    total = 0
    for file in sorted(set(index["weight_map"].values())):
        with safe_open(out / file, "pt") as shard:
            assert shard.metadata() == {"format": "pt"}
            assert set(shard.keys()) == {name for name, home in index["weight_map"].items() if home == file}
            total += sum(shard.get_tensor(name).nbytes for name in shard.keys())  # noqa: SIM118
    assert total == index["metadata"]["total_size"] == summary.nbytes
    assert summary.shards == len(set(index["weight_map"].values())) > 2
    assert (out / "tokenizer.json").read_bytes() == (sources["mixtral"] / "tokenizer.json").read_bytes()
    assert (out / "generation_config.json").exists()
    assert not [path for path in out.iterdir() if path.name.endswith(".partial")]


def test_tensors_are_aligned_to_their_elements(sources, tmp_path):
    quantize(sources["mixtral"], "nvfp4", tmp_path / "out", linears=True, shard_bytes=SHARD)
    sizes = {"F32": 4, "BF16": 2, "U8": 1, "F8_E4M3": 1}
    for entry in CheckpointIndex.open(tmp_path / "out").tensors.values():
        assert entry.begin % sizes[entry.dtype] == 0


WORKER = """
import sys, time
from pathlib import Path
from muster.lab.build.quantize import quantize

def progress(done, total):
    if done > 0.6 * total:
        print("past the middle", flush=True)
        time.sleep(100)

quantize(Path(sys.argv[1]), "nvfp4", Path(sys.argv[2]), shard_bytes=int(sys.argv[3]), progress=progress)
"""


def start_and_stop_in_the_middle(source: Path, out: Path) -> subprocess.Popen:
    """A process that quantises and stands still past the middle, inside a shard."""
    command = [sys.executable, "-c", WORKER, source, out, str(SHARD)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert worker.stdout.readline() == b"past the middle\n", worker.communicate()
    return worker


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT], ids=["kill", "ctrl-c"])
def test_interrupted_work_resumes_to_identical_files(sources, tmp_path, how):
    source = sources["mixtral"]
    quantize(source, "nvfp4", tmp_path / "whole", shard_bytes=SHARD)
    out = tmp_path / "out"
    worker = start_and_stop_in_the_middle(source, out)
    worker.send_signal(how)
    worker.communicate(timeout=30)
    assert worker.returncode == -how
    names = set(files(out))
    assert "config.json" not in names
    shards = [name for name in names if name.startswith("model-")]
    assert 1 <= len(shards) < len(list((tmp_path / "whole").glob("*.safetensors")))
    assert any(name.endswith(".partial") for name in names) is (how is signal.SIGKILL)
    first = next(out.glob("model-00001-*.safetensors")).stat().st_mtime_ns

    summary = quantize(source, "nvfp4", out, shard_bytes=SHARD)
    assert summary.kept >= 1
    assert next(out.glob("model-00001-*.safetensors")).stat().st_mtime_ns == first
    assert files(out) == files(tmp_path / "whole")


def test_a_damaged_shard_is_written_again_and_a_finished_checkpoint_is_left_alone(sources, tmp_path):
    out = tmp_path / "out"
    quantize(sources["mixtral"], "mxfp4", out, shard_bytes=SHARD)
    whole = files(out)
    shard = sorted(out.glob("model-*.safetensors"))[1]
    shard.write_bytes(shard.read_bytes()[:-1])
    summary = quantize(sources["mixtral"], "mxfp4", out, shard_bytes=SHARD)
    assert summary.kept == summary.shards - 1
    assert files(out) == whole
    assert quantize(sources["mixtral"], "mxfp4", out, shard_bytes=SHARD).kept == summary.shards


def limit_file_size() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_full_disk_is_named_with_its_sizes_and_the_work_resumes(sources, tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "muster.cli", "quantize", sources["mixtral"], "--format", "nvfp4", "-o", out]
    done = subprocess.run(command, preexec_fn=limit_file_size, capture_output=True, text=True, check=False)
    assert done.returncode == 3
    assert f"disk space for {out}/model-00001-of-00001.safetensors: found" in done.stderr
    assert "bytes free, expected" in done.stderr
    assert set(files(out)) == {STATE_NAME}
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    quantize(sources["mixtral"], "nvfp4", tmp_path / "whole")
    assert files(out) == files(tmp_path / "whole")


def test_a_disk_too_small_is_refused_before_any_work(sources, tmp_path):
    small = tmp_path / "small"
    small.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mount.returncode:
        pytest.skip("mounting is not permitted here")
    try:
        with pytest.raises(EnvironmentLackError, match=r"found [\d,]+ bytes free, expected [\d,]+ bytes"):
            quantize(sources["mixtral"], "nvfp4", small / "out")
        assert list(files(small / "out")) == [STATE_NAME]
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_what_is_in_the_way_is_never_overwritten(sources, tmp_path):
    source, out = sources["mixtral"], tmp_path / "out"
    with pytest.raises(UsageError, match="the source itself"):
        quantize(source, "nvfp4", source / ".." / source.name)
    with pytest.raises(UsageError, match="one of nvfp4, nvfp4-ct, mxfp4, fp8-block"):
        quantize(source, "int3", out)
    assert not out.exists()
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(UsageError, match=r"notes\.txt"):
        quantize(source, "nvfp4", out)
    assert list(files(out)) == ["notes.txt"]
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(UsageError, match="found a file"):
        quantize(source, "nvfp4", file)


def test_work_resumes_only_for_the_same_source_and_options(sources, tmp_path):
    out = tmp_path / "out"
    quantize(sources["mixtral"], "nvfp4", out)
    whole = files(out)
    with pytest.raises(UsageError, match="another format"):
        quantize(sources["mixtral"], "mxfp4", out)
    with pytest.raises(UsageError, match="another linears"):
        quantize(sources["mixtral"], "nvfp4", out, linears=True)
    with pytest.raises(UsageError, match="another source"):
        quantize(sources["qwen3_moe"], "nvfp4", out)
    assert files(out) == whole


def test_two_processes_do_not_write_to_one_directory(sources, tmp_path):
    out = tmp_path / "out"
    worker = start_and_stop_in_the_middle(sources["mixtral"], out)
    try:
        with pytest.raises(UsageError, match="another process"):
            quantize(sources["mixtral"], "nvfp4", out, shard_bytes=SHARD)
    finally:
        worker.kill()
        worker.communicate()


def test_a_quantised_source_is_refused(sources, tmp_path):
    quantize(sources["mixtral"], "fp8-block", tmp_path / "fp8")
    with pytest.raises(UsageError, match="already quantised") as caught:
        quantize(tmp_path / "fp8", "nvfp4", tmp_path / "out")
    assert "24 modules" in str(caught.value) or "experts.{0-3}" in str(caught.value)
    assert not (tmp_path / "out").exists()


def copy_of(source: Path, target: Path, change) -> Path:
    from safetensors.torch import load_file, save_file

    target.mkdir()
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((source / "config.json").read_bytes())
    return target


def test_weights_that_are_no_numbers_stop_the_work_with_their_name(sources, tmp_path):
    name = "model.layers.1.block_sparse_moe.experts.2.w3.weight"

    def change(tensors):
        tensors[name][5, 7] = torch.nan

    with pytest.raises(FormatError, match=rf"{name}: found 1 not finite, the first at \(5, 7\)"):
        quantize(copy_of(sources["mixtral"], tmp_path / "source", change), "nvfp4", tmp_path / "out")
    assert list(files(tmp_path / "out")) == [STATE_NAME]
    quantize(sources["mixtral"], "mxfp4", tmp_path / "out")


def test_missing_experts_are_all_named(sources, tmp_path):
    def change(tensors):
        del tensors["model.layers.0.block_sparse_moe.experts.1.w1.weight"]
        del tensors["model.layers.1.block_sparse_moe.experts.3.w2.weight"]

    with pytest.raises(CheckpointError) as caught:
        quantize(copy_of(sources["mixtral"], tmp_path / "source", change), "nvfp4", tmp_path / "out")
    assert "layers.0.block_sparse_moe.experts.1.w1" in str(caught.value)
    assert "layers.1.block_sparse_moe.experts.3.w2" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_sizes_a_format_cannot_cut_are_refused_before_any_work(tmp_path):
    odd = MixtralConfig(**SIZES | {"hidden_size": 144}, intermediate_size=72, num_local_experts=2)
    MixtralForCausalLM(odd).to(torch.bfloat16).save_pretrained(tmp_path / "odd")
    for format, expected in (
        ("nvfp4", "multiple of 16"),
        ("mxfp4", "multiple of 32"),
        ("fp8-block", "multiple of 128"),
    ):
        with pytest.raises(UsageError, match=expected):
            quantize(tmp_path / "odd", format, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_prints_one_json_document(sources, tmp_path):
    command = [sys.executable, "-m", "muster.cli", "quantize", sources["mixtral"], "--format", "nvfp4", "--json"]
    done = subprocess.run([*command, "-o", tmp_path / "out"], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    assert document["matrices"] == 24
    assert document["nbytes"] == CheckpointIndex.open(tmp_path / "out").nbytes
    assert "quantising to nvfp4: 100 %" in done.stderr
