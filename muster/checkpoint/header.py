"""The header of one safetensors file: every tensor's dtype, shape and place, checked without reading the weights.

Layout of a file: an unsigned little-endian 64-bit length, that many bytes of JSON, then the tensors' bytes, which
follow each other without gap or overlap (safetensors format, https://github.com/huggingface/safetensors).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from operator import itemgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from muster.checkpoint.names import shown
from muster.errors import CheckpointError

LONGEST_HEADER = 100_000_000
"""Bytes; the format's own limit."""

_MOST_AXES = 64
_MOST_ELEMENTS = 1 << 62
_FARTHEST = 1 << 62
_LISTED = 20
_LFS_START = b"version https://git-lfs"

BITS: Mapping[str, int] = MappingProxyType(
    {
        **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
        **dict.fromkeys(("F32", "I32", "U32"), 32),
        **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
        **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
        **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
        "F4": 4,
    }
)
"""Bits per element of every safetensors dtype."""


class TensorEntry(NamedTuple):
    """Where one tensor lies.

    Attributes:
        name: its name.
        dtype: the safetensors name of its dtype (`BF16`, `F8_E4M3`, `U8`, ...).
        shape: its shape as stored.
        file: the file that holds it.
        begin, end: its bytes in that file, counted from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes it takes on disk."""
        return self.end - self.begin


@dataclass(frozen=True)
class Header:
    """What one file holds, and everything that is wrong with it.

    Attributes:
        file: the file.
        entries: its tensors by name; None when the header cannot be read at all.
        problems: what is wrong.
    """

    file: Path
    entries: Mapping[str, TensorEntry] | None
    problems: list[CheckpointError] = field(default_factory=list)


def read_header(file: Path) -> Header:
    """The header of `file`. Whatever the file holds, problems are returned, not raised."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(min(size, 512))
            if start.startswith(_LFS_START):
                return Header(file, None, [lfs_pointer(file, start, size)])
            length = int.from_bytes(start[:8], "little")
            problem = _length_problem(file, size, length)
            if problem is not None:
                return Header(file, None, [problem])
            stream.seek(8)
            text = stream.read(length)
    except OSError as error:
        return Header(file, None, [unreadable(file, error)])

    try:
        table = parse_json(text)
    except ValueError as error:
        return Header(file, None, [_bad_json(file, str(error))])
    if not isinstance(table, dict):
        return Header(file, None, [_bad_json(file, f"a JSON {type(table).__name__}")])
    return _check(file, size, 8 + length, table)


def parse_json(text: bytes) -> Any:
    """JSON in UTF-8 from a file that may be hostile.

    Raises:
        ValueError: not UTF-8, not JSON, nested too deeply, or a number too long.
    """
    try:
        return json.loads(text.decode("utf-8"))
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None


def lfs_pointer(file: Path, text: bytes, size: int) -> CheckpointError:
    """The problem of a Git-LFS pointer that stands where `file` should be."""
    lines = dict(line.partition(b" ")[::2] for line in text.splitlines())
    declared = lines.get(b"size", b"").decode("ascii", "replace")
    return CheckpointError(
        str(file),
        found=f"a Git-LFS pointer of {size:,} bytes",
        expected=f"the file it stands for, {int(declared):,} bytes" if declared.isdecimal() else "the file it names",
        hint=f"run `git lfs pull` in {file.parent}, or download the file again",
    )


def is_lfs_pointer(text: bytes) -> bool:
    """Whether these first bytes of a file are those of a Git-LFS pointer."""
    return text.startswith(_LFS_START)


def unreadable(file: Path, error: OSError, noun: str = "a file") -> CheckpointError:
    """The problem of a file or a directory that the operating system refuses to read."""
    return CheckpointError(shown(str(file)), found=error.strerror or str(error), expected=f"{noun} that can be read")


def _length_problem(file: Path, size: int, length: int) -> CheckpointError | None:
    again = "download the file again"
    if size < 8:
        return CheckpointError(
            str(file), found=f"{size} bytes: truncated", expected="at least the 8 bytes of a header length", hint=again
        )
    if length > size - 8:
        return CheckpointError(
            str(file),
            found=f"a header of {length:,} bytes in a file of {size:,} bytes",
            expected=f"at least {8 + length:,} bytes",
            hint=f"the file is truncated or is no safetensors file; {again}",
        )
    if length > LONGEST_HEADER:
        return CheckpointError(
            str(file), found=f"a header of {length:,} bytes", expected=f"at most {LONGEST_HEADER:,} bytes"
        )
    return None


def _bad_json(file: Path, found: str) -> CheckpointError:
    return CheckpointError(
        f"{file}: header", found=shown(found), expected="a JSON object", hint="download the file again"
    )


_FIELDS = itemgetter("dtype", "shape", "data_offsets")


def _check(file: Path, file_size: int, base: int, table: dict[str, Any]) -> Header:
    metadata = table.pop("__metadata__", {})
    entries: dict[str, TensorEntry] = {}
    bad: list[CheckpointError] = []
    if not isinstance(metadata, dict):
        bad.append(CheckpointError(f"{file}: __metadata__", found=type(metadata).__name__, expected="an object"))
    # Checkpoints have many tensors of few shapes: each (dtype, shape) is checked once.
    known: dict[tuple[str, tuple[int, ...]], tuple[str, tuple[int, ...], int] | None] = {}
    at, in_order = 0, True
    for name, fields in table.items():
        try:
            dtype, shape, (begin, end) = _FIELDS(fields)
            axes = tuple(shape)
            kind = known.get((dtype, axes))
            if kind is None:
                kind = known[dtype, axes] = _kind(dtype, axes)
            if kind is not None and type(begin) is type(end) is int and 0 <= begin <= _FARTHEST:
                dtype, axes, size = kind
                if end - begin == size:
                    entries[name] = TensorEntry(name, dtype, axes, file, base + begin, base + end)
                    in_order = in_order and begin == at
                    at = end
                    continue
        except (KeyError, TypeError, ValueError):
            pass
        bad.append(_entry_problem(file, name, fields))
    problems = bad[:_LISTED]
    if len(bad) > _LISTED:
        problems.append(CheckpointError(str(file), found=f"{len(bad) - _LISTED:,} more entries like these"))
    if len(entries) == len(table) and not (in_order and base + at == file_size):
        problems += _place_problems(file, file_size, base, entries)
    return Header(file, entries, problems)


def _kind(dtype: object, axes: tuple[Any, ...]) -> tuple[str, tuple[int, ...], int] | None:
    """Dtype, shape and bytes of a tensor; None when it cannot be one."""
    if not isinstance(dtype, str) or dtype not in BITS or len(axes) > _MOST_AXES:
        return None
    if any(type(axis) is not int or axis < 0 for axis in axes) or prod(axis or 1 for axis in axes) > _MOST_ELEMENTS:
        return None
    size, rest = divmod(prod(axes) * BITS[dtype], 8)
    return None if rest else (dtype, axes, size)


def _entry_problem(file: Path, name: str, fields: object) -> CheckpointError:
    """Says which rule an entry of the header breaks."""
    thing = f"{file}: {shown(name)}"
    if not isinstance(fields, dict):
        return CheckpointError(thing, found=shown(repr(fields)), expected="an object with dtype, shape, data_offsets")
    dtype, shape, offsets = fields.get("dtype"), fields.get("shape"), fields.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        return CheckpointError(
            f"{thing}: dtype", found=shown(repr(dtype)), expected=f"a safetensors dtype: {', '.join(BITS)}"
        )
    if not isinstance(shape, list) or any(type(axis) is not int or axis < 0 for axis in shape):
        return CheckpointError(f"{thing}: shape", found=shown(repr(shape)), expected="a list of whole numbers >= 0")
    if len(shape) > _MOST_AXES or prod(axis or 1 for axis in shape) > _MOST_ELEMENTS:
        return CheckpointError(f"{thing}: shape", found=shown(repr(shape)), expected="a size that memory can address")
    if (
        not isinstance(offsets, list)
        or len(offsets) != 2
        or any(type(offset) is not int for offset in offsets)
        or not 0 <= offsets[0] <= offsets[1] <= _FARTHEST
    ):
        return CheckpointError(
            f"{thing}: data_offsets", found=shown(repr(offsets)), expected="[begin, end], 0 <= begin <= end, in reach"
        )
    bits = prod(shape) * BITS[dtype]
    needed = f"{bits // 8:,}" if bits % 8 == 0 else f"{bits / 8}"
    return CheckpointError(
        thing, found=f"{offsets[1] - offsets[0]:,} bytes", expected=f"{needed} bytes for {dtype} {shape}"
    )


def _place_problems(file: Path, size: int, base: int, entries: Mapping[str, TensorEntry]) -> list[CheckpointError]:
    """Truncation, bytes left over, gaps and overlaps."""
    problems: list[CheckpointError] = []
    last: TensorEntry | None = None
    at = base
    for entry in sorted(entries.values(), key=itemgetter(4, 5)):
        if entry.begin != at and len(problems) < _LISTED:
            what = "a gap" if entry.begin > at else "an overlap"
            after = shown(last.name) if last else "the header"
            problems.append(
                CheckpointError(
                    f"{file}: {shown(entry.name)}",
                    found=f"offset {entry.begin - base:,}: {what} of {abs(entry.begin - at):,} bytes after {after}",
                    expected=f"offset {at - base:,}",
                )
            )
        if entry.end >= at:
            at, last = entry.end, entry
    if at > size:
        problems.append(
            CheckpointError(
                str(file),
                found=f"{size:,} bytes: truncated",
                expected=f"{at:,} bytes, by its header",
                hint="download the file again",
            )
        )
    elif at < size:
        problems.append(
            CheckpointError(str(file), found=f"{size:,} bytes", expected=f"{at:,} bytes, by its header; not more")
        )
    return problems
