"""Ten thousand damaged configs, headers and directories: every one gets an answer or a named error."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from configs import NAMES, Config, config
from sparse import write_sparse

from muster.checkpoint import presets
from muster.checkpoint.config import interpret, read_config
from muster.checkpoint.header import read_header
from muster.checkpoint.inventory import Inventory
from muster.checkpoint.modules import claimed_modules
from muster.checkpoint.storage import Layout, headers
from muster.errors import MusterError

Tree = Any
Step = tuple[Any, Any]


def deep(levels: int) -> Tree:
    value: Tree = []
    for _ in range(levels):
        value = [value]
    return value


STRANGE: tuple[Tree, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 128, 4095, 2**31 - 1, 2**31, 2**63, 10**400, -(2**64)),
    *(math.nan, math.inf, -math.inf, 0.5, 1e-300, 1e308, -0.0),
    *("", "x", "1", "bfloat16", "full_attention", "fp8", "NVFP4", "re:(", "re:.*", "*", "[", "\x00\ud800", "é" * 300),
    *([], {}, [None], [[]], [1, 2], [-1], ["x"], [{}], {"": None}, {"a": {"b": {"c": None}}}, {"quant_algo": "FP8"}),
    *(deep(20), deep(400), [0] * 5000),
)


@cache
def claims() -> tuple[Config | None, ...]:
    """The quantisation claims of all released checkpoints, and none."""
    found = [presets.preset(name).config.get("quantization_config") for name in presets.names()]
    return (None, *(claim for claim in found if isinstance(claim, dict)))


def places(tree: Tree) -> list[Step]:
    """Every container and key in a JSON tree."""
    found: list[Step] = []
    stack = [tree]
    while stack:
        value = stack.pop()
        keys = list(value) if isinstance(value, dict) else range(min(len(value), 8))
        found += [(value, key) for key in keys]
        stack += [value[key] for key in keys if isinstance(value[key], dict | list)]
    return found


def damage(tree: Tree, chance: random.Random) -> None:
    """Changes one to three places: another value, a value from elsewhere, no value, a new key."""
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        steps = places(tree)
        if not steps:
            return
        container, key = chance.choice(steps)
        kind = chance.randrange(8)
        if kind == 0 and isinstance(container, dict):
            del container[key]
        elif kind == 1:
            other, there = chance.choice(steps)
            container[key] = copy.deepcopy(other[there])
        elif kind == 2 and isinstance(container, dict):
            container[chance.choice(("new", "num_experts", "n_group", "layer_types", ""))] = chance.choice(STRANGE)
        elif kind == 3 and isinstance(container[key], int) and not isinstance(container[key], bool):
            container[key] += chance.choice((-1, 1, container[key], -2 * container[key]))
        else:
            container[key] = copy.deepcopy(chance.choice(STRANGE))


def expect_answers(cases: int, answer: Callable[[random.Random], bool], *, both: bool = True) -> None:
    """Every case answers (true), or raises a MusterError that says something; `both` happen."""
    answered = refused = 0
    for seed in range(cases):
        try:
            answered += answer(random.Random(seed))
        except MusterError as error:
            refused += bool(error.thing and len(str(error)) > 10)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
    assert answered + refused == cases
    assert not both or (answered > cases // 50 and refused > cases // 50), (answered, refused)


def test_damaged_configs() -> None:
    def answer(chance: random.Random) -> bool:
        made = config(chance.choice(NAMES))
        claim = chance.choice(claims())
        if claim is not None:
            made["quantization_config"] = copy.deepcopy(claim)
        damage(made, chance)
        beside = {"quantization": copy.deepcopy(claim)} if chance.random() < 0.1 else None
        if beside is not None:
            damage(beside, chance)
        spec = interpret(made, beside).spec
        modules = claimed_modules(spec, Layout.usual(spec)).values()
        assert all(type(module.nbytes) is int and module.nbytes >= 0 for module in modules)
        assert sum(module.parameters for module in modules) > 0
        return True

    expect_answers(5_000, answer)


def test_damaged_config_files(tmp_path: Path) -> None:
    def answer(chance: random.Random) -> bool:
        text = bytearray(json.dumps(config(chance.choice(NAMES))).encode())
        for _ in range(chance.choice((1, 2, 5))):
            at = chance.randrange(len(text) + 1)
            kind = chance.randrange(5)
            if kind == 0:
                del text[at:]
            elif kind == 1:
                text[at:at] = bytes(chance.randrange(256) for _ in range(3))
            elif kind == 2:
                text[at:at] = chance.choice((b"NaN", b"1e999", b"[" * 3000, b'{"a":1,"a":2}', b"\xff\xfe", b'"', b"}"))
            elif kind == 3:
                text[at : at + chance.randrange(20)] = b""
            else:
                text[at:at] = text[max(0, at - 40) : at]
            if not text:
                break
        (tmp_path / "config.json").write_bytes(bytes(text))
        read_config(tmp_path)
        return True

    expect_answers(1_000, answer, both=False)


def entries() -> dict[str, Any]:
    return {
        "__metadata__": {"format": "pt"},
        "a.weight": {"dtype": "BF16", "shape": [4, 8], "data_offsets": [0, 64]},
        "a.bias": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
        "b.weight": {"dtype": "U8", "shape": [2, 8], "data_offsets": [80, 96]},
        "b.weight_scale": {"dtype": "F8_E4M3", "shape": [2, 1], "data_offsets": [96, 98]},
        "c": {"dtype": "F32", "shape": [], "data_offsets": [98, 102]},
    }


def damaged_file(table: Tree, payload: int, chance: random.Random) -> bytes:
    """A safetensors file of a table that may be damaged, with a length, a text or a payload that may be too."""
    if chance.random() < 0.7:
        damage(table, chance)
    text = json.dumps(table).encode()
    if chance.random() < 0.1:
        text = text.replace(b"}}", b'},"a.weight":{"dtype":"BF16","shape":[4,8],"data_offsets":[0,64]}}', 1)
    length = len(text)
    if chance.random() < 0.2:
        length += chance.choice((-1, 1, -length, 7, 1 << 20, 1 << 62))
    payload += chance.choice((0, 0, 0, 0, -1, 1, 64))
    whole = (max(0, length) % (1 << 64)).to_bytes(8, "little") + text + bytes(max(0, payload))
    return whole[: chance.randrange(len(whole))] if chance.random() < 0.1 else whole


def test_damaged_headers(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    sound = 0
    for seed in range(2_500):
        chance = random.Random(seed)
        file.write_bytes(damaged_file(entries(), 102, chance))
        try:
            header = read_header(file)
        except Exception as error:
            raise AssertionError(f"seed {seed}: {type(error).__name__}: {error}") from error
        size = file.stat().st_size
        if not header.problems:
            assert header.entries is not None, f"seed {seed}"
            ends = sorted((entry.begin, entry.end) for entry in header.entries.values())
            assert all(0 <= begin <= end <= size for begin, end in ends), f"seed {seed}"
            assert all(first[1] == second[0] for first, second in pairwise(ends)), f"seed {seed}"
            sound += 1
        assert all(len(str(problem)) > 10 for problem in header.problems), f"seed {seed}"
    assert 100 < sound < 2_400


def test_damaged_directories(tmp_path: Path) -> None:
    made = config("qwen3_moe", num_hidden_layers=1, num_experts=2)
    spec = interpret(made).spec
    whole = write_sparse(tmp_path / "whole", made, headers(spec, Layout()), shard=60_000)
    files = {path.name: path.read_bytes() for path in sorted(whole.iterdir())}
    assert len([name for name in files if name.endswith(".safetensors")]) > 2
    place = tmp_path / "damaged"
    place.mkdir()

    def answer(chance: random.Random) -> bool:
        for path in place.iterdir():
            path.unlink()
        left = dict(files)
        for _ in range(chance.choice((0, 1, 1, 2, 4))):
            name = chance.choice(sorted(files))
            left[name] = damaged(files[name], chance)
            if chance.random() < 0.2:
                left[chance.choice(("extra.safetensors", "mtp.safetensors", "pytorch_model.bin"))] = left[name]
            if chance.random() < 0.2:
                left.pop(name, None)
        for name, content in left.items():
            (place / name).write_bytes(content)
        found = Inventory.of(str(place))
        assert found.source == "config" or found.nbytes == sum(e.nbytes for e in found.index.tensors.values())
        return True

    def damaged(content: bytes, chance: random.Random) -> bytes:
        kind = chance.randrange(6)
        if kind == 0:
            return content[: chance.randrange(len(content) + 1)]
        if kind == 1:
            return b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n"
        if content.startswith(b"{"):
            tree = json.loads(content)
            damage(tree, chance)
            return json.dumps(tree).encode()
        length = int.from_bytes(content[:8], "little")
        return damaged_file(json.loads(content[8 : 8 + length]), len(content) - 8 - length, chance)

    expect_answers(1_500, answer)


@pytest.mark.parametrize("model", ["", "\0", "a" * 5000, "~nobody-at-all/x", "/dev/null", "no/such.json", "."])
def test_a_model_that_is_none_is_refused_by_name(model: str) -> None:
    with pytest.raises(MusterError):
        Inventory.of(model)
