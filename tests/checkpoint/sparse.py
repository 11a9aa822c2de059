"""Checkpoints of any size on disk that take no space: real headers, files of holes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import Any

from muster.checkpoint.header import BITS
from muster.checkpoint.storage import TensorHeader

SHARD = 5_000_000_000


def write_sparse(directory: Path, config: Any, headers: Iterable[TensorHeader], shard: int = SHARD) -> Path:
    """Writes config.json, an index and shards of about `shard` bytes; the weights are holes."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(dict(config)))
    tables: list[dict[str, Any]] = [{}]
    at = total = 0
    for name, dtype, shape in headers:
        size = prod(shape) * BITS[dtype] // 8
        if at + size > shard and tables[-1]:
            tables.append({})
            at = 0
        tables[-1][name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
        at += size
        total += size
    weight_map: dict[str, str] = {}
    for number, table in enumerate(tables, 1):
        file = directory / f"model-{number:05d}-of-{len(tables):05d}.safetensors"
        text = json.dumps({"__metadata__": {"format": "pt"}, **table}, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + max(entry["data_offsets"][1] for entry in table.values()))
        weight_map |= dict.fromkeys(table, file.name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    return directory
