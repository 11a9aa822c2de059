"""Directories of safetensors files, good, damaged and hostile, written to disk and opened."""

from __future__ import annotations

import json
import subprocess
import sys
import tracemalloc
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from muster.checkpoint.index import CheckpointIndex
from muster.errors import CheckpointError, MusterError

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def write_raw(path: Path, header: Any, payload: bytes = b"", *, pad: int = 0) -> None:
    """A safetensors file with whatever header; `pad` spaces move the payload off its alignment."""
    text = (header if isinstance(header, bytes) else json.dumps(header).encode()) + b" " * pad
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def write_shards(directory: Path, shards: dict[str, dict[str, torch.Tensor]]) -> dict[str, Any]:
    """Shards and their index; returns the index's content."""
    for file, tensors in shards.items():
        save_file(tensors, directory / file)
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    total = sum(t.nbytes for tensors in shards.values() for t in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return index


def two_shards(directory: Path) -> dict[str, Any]:
    return write_shards(
        directory,
        {
            "model-00001-of-00002.safetensors": {f"model.layers.{i}.a": torch.full((4,), float(i)) for i in range(3)},
            "model-00002-of-00002.safetensors": {"b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(5)},
        },
    )


def rewrite_index(directory: Path, index: dict[str, Any]) -> None:
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def refusal(directory: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        CheckpointIndex.open(directory)
    return str(caught.value)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_reads_bit_for_bit_without_a_warning(tmp_path: Path, dtype: str) -> None:
    bits = torch.arange(0, 256, dtype=torch.uint8).repeat(3)
    source = (bits % 2 if dtype == "BOOL" else bits).view(DTYPES[dtype]).view(3, -1)
    write_raw(
        tmp_path / "model.safetensors",
        {"x": entry(dtype, list(source.shape), 0, source.nbytes)},
        source.view(torch.uint8).numpy().tobytes(),
    )
    index = CheckpointIndex.open(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tensor = index.read("x")
    assert tensor.dtype == DTYPES[dtype]
    assert tensor.shape == source.shape
    assert torch.equal(tensor.view(torch.uint8), source.view(torch.uint8))


def test_reading_equals_the_safetensors_library_for_scalars_and_empty_tensors_too(tmp_path: Path) -> None:
    tensors = {
        "scalar": torch.tensor(1.5),
        "empty": torch.empty(0, 7, dtype=torch.float16),
        "matrix": torch.randn(5, 7, dtype=torch.float64),
        "bytes": torch.arange(9, dtype=torch.uint8),
        "half": torch.randn(3, 2, 4).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    index = CheckpointIndex.open(tmp_path)
    assert set(index.tensors) == set(tensors)
    assert index.nbytes == sum(t.nbytes for t in tensors.values())
    for name, tensor in tensors.items():
        assert index.read(name).dtype == tensor.dtype
        assert index.read(name).shape == tensor.shape
        assert torch.equal(index.read(name), tensor)


@pytest.mark.parametrize("pad", range(8))
def test_payloads_at_any_alignment_read_right(tmp_path: Path, pad: int) -> None:
    flags, numbers = torch.tensor([True, False, True]), torch.randn(4, dtype=torch.float64)
    payload = flags.numpy().tobytes() + numbers.numpy().tobytes()
    header = {"flags": entry("BOOL", [3], 0, 3), "numbers": entry("F64", [4], 3, 35)}
    write_raw(tmp_path / "model.safetensors", header, payload, pad=pad)
    index = CheckpointIndex.open(tmp_path)
    assert torch.equal(index.read("numbers"), numbers)
    assert torch.equal(index.read("flags"), flags)


def test_aligned_tensors_share_one_mapping_and_writing_to_them_leaves_the_file_alone(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1024), "b": torch.ones(1024)}, tmp_path / "model.safetensors")
    index = CheckpointIndex.open(tmp_path)
    before = (tmp_path / "model.safetensors").read_bytes()
    a, b = index.read("a"), index.read("b")
    assert a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()
    a.mul_(2)
    assert (tmp_path / "model.safetensors").read_bytes() == before


def test_tensors_outlive_their_index(tmp_path: Path) -> None:
    save_file({"a": torch.arange(4096.0)}, tmp_path / "model.safetensors")
    a = CheckpointIndex.open(tmp_path).read("a")
    assert torch.equal(a, torch.arange(4096.0))


def test_copy_into_fills_exactly_the_given_memory_from_several_threads(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.randint(0, 256, (3 << 20,), dtype=torch.uint8) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    stack = torch.full((10, 3 << 20), 7, dtype=torch.uint8)
    CheckpointIndex.open(tmp_path).copy_into([(f"t{i}", stack[i + 1]) for i in range(8)])
    assert torch.equal(stack[1:9], torch.stack(list(tensors.values())))
    assert bool((stack[0] == 7).all())
    assert bool((stack[9] == 7).all())


def test_a_file_cut_short_after_opening_is_an_error_not_garbage(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1024)}, tmp_path / "model.safetensors")
    index = CheckpointIndex.open(tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:-8])
    with pytest.raises(CheckpointError, match="a: found the end of the file"):
        index.copy_into([("a", torch.empty(1024))])


def test_shards_open_as_one(tmp_path: Path) -> None:
    two_shards(tmp_path)
    index = CheckpointIndex.open(tmp_path)
    assert set(index.tensors) == {"model.layers.0.a", "model.layers.1.a", "model.layers.2.a", "b", "c"}
    assert index.tensors["b"].dtype == "BF16"
    assert index.tensors["b"].shape == (2, 3)
    assert index.tensors["b"].file.name == "model-00002-of-00002.safetensors"
    assert torch.equal(index.read("model.layers.2.a"), torch.full((4,), 2.0))


def test_a_file_of_another_name_is_opened_when_the_index_lists_it(tmp_path: Path) -> None:
    write_shards(
        tmp_path,
        {"model-00001-of-00001.safetensors": {"a": torch.ones(2)}, "mtp.safetensors": {"mtp.fc": torch.ones(3)}},
    )
    assert CheckpointIndex.open(tmp_path).read("mtp.fc").shape == (3,)


def test_what_is_not_a_directory_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    assert "found nothing, expected a checkpoint directory" in refusal(tmp_path / "absent")
    assert "found a file, expected a checkpoint directory" in refusal(tmp_path / "file")


def test_a_directory_of_other_formats_says_which(tmp_path: Path) -> None:
    assert "no safetensors file" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (tmp_path / "model.Q4_K_M.gguf").write_bytes(b"x")
    assert "only model.Q4_K_M.gguf, pytorch_model.bin" in refusal(tmp_path)


def test_several_files_without_an_index_are_named(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "model-00001-of-00002.safetensors")
    save_file({"b": torch.ones(1)}, tmp_path / "model-00002-of-00002.safetensors")
    message = refusal(tmp_path)
    assert "2 safetensors files and no index" in message
    assert "model-00001-of-00002.safetensors" in message


def test_a_missing_shard_is_named_with_what_it_should_hold(tmp_path: Path) -> None:
    two_shards(tmp_path)
    (tmp_path / "model-00001-of-00002.safetensors").unlink()
    message = refusal(tmp_path)
    assert "model-00001-of-00002.safetensors: found no such file" in message
    assert "a shard with 3 tensors" in message
    assert "1 problem" in message


def test_a_git_lfs_pointer_says_both_sizes_and_what_to_run(tmp_path: Path) -> None:
    two_shards(tmp_path)
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4932000123\n"
    (tmp_path / "model-00002-of-00002.safetensors").write_text(pointer)
    message = refusal(tmp_path)
    assert f"a Git-LFS pointer of {len(pointer)} bytes" in message
    assert "4,932,000,123 bytes" in message
    assert "git lfs pull" in message
    (tmp_path / "model.safetensors.index.json").write_text(pointer)
    assert "model.safetensors.index.json: found a Git-LFS pointer" in refusal(tmp_path)


@pytest.mark.parametrize("kept", [0, 5, 8, 30, -1])
def test_a_truncated_file_says_both_sizes(tmp_path: Path, kept: int) -> None:
    save_file({"a": torch.ones(64), "b": torch.ones(64)}, tmp_path / "model.safetensors")
    data = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(data[:kept])
    message = refusal(tmp_path)
    assert "truncated" in message
    assert f"{len(data[:kept])} bytes" in message
    if kept == -1:
        assert f"expected {len(data)} bytes" in message


def test_bytes_after_the_last_tensor_are_an_error(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"a": entry("U8", [2], 0, 2)}, b"abc")
    assert "by its header; not more" in refusal(tmp_path)


BAD_ENTRIES = {
    "an overlap": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 2, 6)}, 6, "an overlap of 2 bytes after a"),
    "a hole": ({"a": entry("U8", [4], 0, 4), "b": entry("U8", [4], 6, 10)}, 10, "a gap of 2 bytes after a"),
    "a late start": ({"a": entry("U8", [4], 1, 5)}, 5, "a gap of 1 bytes after the header"),
    "a wrong size": ({"a": entry("F32", [4], 0, 12)}, 12, "found 12 bytes, expected 16 bytes for F32 [4]"),
    "an unknown dtype": ({"a": entry("Q4", [4], 0, 4)}, 4, "dtype: found 'Q4'"),
    "a negative offset": ({"a": entry("U8", [4], -4, 0)}, 4, "data_offsets: found [-4, 0]"),
    "a backward offset": ({"a": entry("U8", [0], 4, 0)}, 4, "data_offsets: found [4, 0]"),
    "an endless offset": ({"a": entry("U8", [4], 10**30, 10**30 + 4)}, 4, "data_offsets"),
    "a fractional offset": ({"a": entry("U8", [4], 0, 4.0)}, 4, "data_offsets: found [0, 4.0]"),  # type: ignore[arg-type]
    "a boolean offset": ({"a": entry("U8", [1], False, True)}, 1, "data_offsets: found [False, True]"),
    "a negative axis": ({"a": entry("U8", [-2, -2], 0, 4)}, 4, "shape: found [-2, -2]"),
    "a text axis": ({"a": entry("U8", ["4"], 0, 4)}, 4, "shape: found ['4']"),  # type: ignore[list-item]
    "an axis out of reach": ({"a": entry("U8", [0, 1 << 40, 1 << 40], 0, 0)}, 0, "memory can address"),
    "too many axes": ({"a": entry("U8", [1] * 65, 0, 1)}, 1, "memory can address"),
    "no offsets": ({"a": {"dtype": "U8", "shape": [1]}}, 1, "data_offsets: found None"),
    "no object": ({"a": 5}, 0, "found 5, expected an object"),
    "a list of dtypes": ({"a": {"dtype": ["U8"], "shape": [1], "data_offsets": [0, 1]}}, 1, "dtype: found ['U8']"),
    "a list for a header": ([1, 2], 0, "found a JSON list"),
    "no JSON": (b"{nonsense", 0, "header: found Expecting property name"),
    "no UTF-8": (b'{"\xff": 1}', 0, "header: found 'utf-8' codec can't decode"),
    "deep nesting": (b'{"a":' * 50_000, 0, "nested too deeply"),
    "a number without end": (b'{"a":' + b"9" * 5000 + b"}", 0, "header: found Exceeds the limit"),
    "a metadata text": ({"__metadata__": "x", "a": entry("U8", [1], 0, 1)}, 1, "__metadata__: found str"),
}


@pytest.mark.parametrize("what", BAD_ENTRIES)
def test_a_broken_header_is_refused_by_name(tmp_path: Path, what: str) -> None:
    header, size, expected = BAD_ENTRIES[what]
    write_raw(tmp_path / "model.safetensors", header, bytes(size))
    assert expected in refusal(tmp_path)


@pytest.mark.parametrize("length", [1 << 62, (1 << 64) - 1, 200_000_000, 10_000])
def test_a_header_longer_than_the_file_is_refused_without_reading_it(tmp_path: Path, length: int) -> None:
    (tmp_path / "model.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}" + bytes(100))
    assert f"a header of {length:,} bytes in a file of 110 bytes" in refusal(tmp_path)


def test_a_header_beyond_the_formats_limit_is_refused_without_reading_it(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((1 << 40).to_bytes(8, "little"))
        file.truncate((1 << 40) + 8)
    assert "expected at most 100,000,000 bytes" in refusal(tmp_path)


def test_a_stray_shard_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    assert "consolidated.safetensors: found a file that model.safetensors.index.json does not list" in refusal(tmp_path)


def test_index_and_files_in_disagreement_are_named_from_both_sides(tmp_path: Path) -> None:
    index = two_shards(tmp_path)
    one, two = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
    index["weight_map"] |= {"ghost": one, "b": one}
    del index["weight_map"]["model.layers.1.a"]
    rewrite_index(tmp_path, index)
    message = refusal(tmp_path)
    assert f"disagree on ghost: found it in no file, expected it in {one}" in message
    assert f"disagree on b: found it in {two}, expected it in {one}" in message
    assert f"disagree on model.layers.1.a: found it in {one}, expected it in the weight_map" in message
    assert "3 problems" in message


def test_a_tensor_in_two_files_is_named(tmp_path: Path) -> None:
    two_shards(tmp_path)
    save_file(
        {"b": torch.ones(2, 3, dtype=torch.bfloat16), "c": torch.zeros(5), "model.layers.0.a": torch.zeros(4)},
        tmp_path / "model-00002-of-00002.safetensors",
    )
    assert "model.layers.0.a: found it in both model-00001-of-00002" in refusal(tmp_path)


def test_a_wrong_total_size_is_named(tmp_path: Path) -> None:
    index = two_shards(tmp_path)
    index["metadata"]["total_size"] += 1
    rewrite_index(tmp_path, index)
    assert "total_size: found 81, expected 80" in refusal(tmp_path)


@pytest.mark.parametrize(
    "name", ["../outside.safetensors", "/etc/outside.safetensors", "sub/x.safetensors", "..", "", "a\0.safetensors"]
)
def test_an_index_cannot_lead_out_of_the_directory(tmp_path: Path, name: str) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    save_file({"x": torch.ones(1)}, tmp_path / "outside.safetensors")
    index = two_shards(inner)
    index["weight_map"]["x"] = name
    rewrite_index(inner, index)
    assert "the name of a .safetensors file in the same directory" in refusal(inner)


@pytest.mark.parametrize("text", ["{}", "[]", '{"weight_map": []}', '{"weight_map": {"a": 1}}', "nonsense", "\xff"])
def test_an_unusable_index_is_named(tmp_path: Path, text: str) -> None:
    two_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin-1"))
    assert "model.safetensors.index.json: found" in refusal(tmp_path)


def test_all_problems_come_in_one_error(tmp_path: Path) -> None:
    index = write_shards(tmp_path, {f"s{i}.safetensors": {f"t{i}": torch.ones(8)} for i in range(5)})
    (tmp_path / "s0.safetensors").unlink()
    (tmp_path / "s1.safetensors").write_text("version https://git-lfs.github.com/spec/v1\nsize 99\n")
    (tmp_path / "s2.safetensors").write_bytes((tmp_path / "s2.safetensors").read_bytes()[:-4])
    save_file({"u": torch.ones(1)}, tmp_path / "stray.safetensors")
    index["weight_map"]["ghost"] = "s4.safetensors"
    rewrite_index(tmp_path, index)
    message = refusal(tmp_path)
    for part in ("s0.safetensors: found no such file", "Git-LFS", "truncated", "stray.safetensors", "ghost"):
        assert part in message
    assert "5 problems" in message


def test_terminal_escapes_in_names_do_not_reach_the_terminal(tmp_path: Path) -> None:
    write_raw(tmp_path / "model.safetensors", {"\x1b[31mred\ud800": entry("U8", [2], 0, 1)}, b"x")
    message = refusal(tmp_path)
    assert "\x1b" not in message
    message.encode()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
SIZE = st.integers(-2, 12) | st.sampled_from([1 << 40, 1 << 70, 10**400])
ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.sampled_from(["U8", "F32", "BF16", "F4", "F8_E4M3", "I64", "Q"]) | JSON,
        "shape": st.lists(SIZE, max_size=4) | JSON,
        "data_offsets": st.lists(SIZE, min_size=2, max_size=2) | JSON,
    },
)
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def open_and_read(directory: Path) -> None:
    """Opens a directory and reads all of it, or is refused; any other exception is a failure."""
    try:
        index = CheckpointIndex.open(directory)
        for name, place in index.tensors.items():
            assert index.read(name).shape == place.shape
    except MusterError as error:
        str(error).encode()


def fresh(directory: Path) -> None:
    for path in directory.iterdir():
        path.unlink()


@FUZZ
@given(header=st.dictionaries(st.text(max_size=12), ENTRY | JSON, max_size=5), payload=st.binary(max_size=40))
def test_any_json_header_opens_or_is_refused(tmp_path: Path, header: dict[str, Any], payload: bytes) -> None:
    fresh(tmp_path)
    write_raw(tmp_path / "model.safetensors", header, payload)
    open_and_read(tmp_path)


@FUZZ
@given(data=st.data())
def test_any_damage_to_a_good_file_opens_or_is_refused(tmp_path: Path, data: st.DataObject) -> None:
    fresh(tmp_path)
    save_file({"a": torch.ones(3), "b": torch.ones(2, 2).bfloat16(), "c": torch.tensor(1)}, tmp_path / "x.safetensors")
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    for at, value in data.draw(st.lists(st.tuples(st.integers(0, len(content) - 1), st.integers(0, 255)), max_size=6)):
        content[at] = value
    cut = data.draw(st.integers(0, len(content)) | st.just(len(content)))
    (tmp_path / "x.safetensors").write_bytes(content[:cut])
    open_and_read(tmp_path)


@FUZZ
@given(
    weight_map=st.dictionaries(
        st.sampled_from(["a", "b", "c", "model.layers.0.x"]) | st.text(max_size=6),
        st.sampled_from(["s1.safetensors", "s2.safetensors", "s3.safetensors", "../s1.safetensors"]) | JSON,
        max_size=6,
    )
    | JSON,
    metadata=st.fixed_dictionaries({"total_size": st.integers() | st.floats()}) | JSON,
)
def test_any_index_opens_or_is_refused(tmp_path: Path, weight_map: Any, metadata: Any) -> None:
    fresh(tmp_path)
    save_file({"a": torch.ones(3), "b": torch.ones(2)}, tmp_path / "s1.safetensors")
    save_file({"c": torch.ones(3)}, tmp_path / "s2.safetensors")
    rewrite_index(tmp_path, {"metadata": metadata, "weight_map": weight_map})
    open_and_read(tmp_path)


def write_sparse(directory: Path, shards: int, per_shard: int) -> None:
    """A checkpoint with headers and no payload on disk: each tensor is a hole of a megabyte."""
    weight_map: dict[str, str] = {}
    size = 1 << 20
    for shard in range(shards):
        file = f"model-{shard:05}.safetensors"
        names = [f"model.layers.{shard}.mlp.experts.{i // 3}.{'gud'[i % 3]}_proj.weight" for i in range(per_shard)]
        header = {name: entry("U8", [1024, 1024], i * size, (i + 1) * size) for i, name in enumerate(names)}
        write_raw(directory / file, header)
        with (directory / file).open("r+b") as stream:
            stream.truncate((directory / file).stat().st_size + per_shard * size)
        weight_map |= dict.fromkeys(names, file)
    index = {"metadata": {"total_size": shards * per_shard * size}, "weight_map": weight_map}
    rewrite_index(directory, index)


def test_an_open_index_holds_a_few_hundred_bytes_per_tensor(tmp_path: Path) -> None:
    write_sparse(tmp_path, shards=2, per_shard=5_000)
    tracemalloc.start()
    index = CheckpointIndex.open(tmp_path)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / len(index.tensors) < 600, f"{held / len(index.tensors):.0f} bytes per tensor"


def test_opening_an_index_imports_no_torch(tmp_path: Path) -> None:
    two_shards(tmp_path)
    code = (
        "import sys, pathlib; from muster.checkpoint.index import CheckpointIndex; "
        f"print(len(CheckpointIndex.open(pathlib.Path({str(tmp_path)!r})).tensors), 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["5", "False"]
