"""Writes a checkpoint directory shard by shard, so that interrupted work resumes and ends in the same bytes.

Everything is planned before any work: which tensors lie where in which file, down to each file's header. A shard is
written under a temporary name, flushed to disk and renamed, so a file under its final name is complete. The index
comes after all shards and config.json last: a directory without it is not a checkpoint yet.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from muster.checkpoint.header import BITS
from muster.checkpoint.index import INDEX_NAME
from muster.errors import EnvironmentLackError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

STATE_NAME = ".muster-writer.json"
SHARD_BYTES = 5 * 10**9

Progress = Callable[[int, int], None]
"""Called with bytes that are in place and bytes in all."""


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to be written: its name, safetensors dtype and shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes it will take."""
        return prod(self.shape) * BITS[self.dtype] // 8


@dataclass(frozen=True)
class Job:
    """Tensors that are made together and lie in one shard; `make` returns them by name."""

    tensors: tuple[PlannedTensor, ...]
    make: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Contents:
    """What a checkpoint directory shall hold.

    Attributes:
        jobs: its tensors, in order.
        files: small files by name, with their bytes.
        config: config.json.
        identity: what the contents are made from and how, as JSON; work resumes only for the same.
    """

    jobs: Sequence[Job]
    files: Mapping[str, bytes]
    config: bytes
    identity: Mapping[str, Any]


@dataclass(frozen=True)
class Written:
    """What a call wrote.

    Attributes:
        directory: the checkpoint.
        nbytes: bytes of all tensors.
        shards: safetensors files.
        kept: how many of them were already there.
    """

    directory: Path
    nbytes: int
    shards: int
    kept: int


class CheckpointWriter:
    """A planned checkpoint."""

    def __init__(self, directory: Path, contents: Contents, shard_bytes: int = SHARD_BYTES) -> None:
        self.directory = directory
        self._contents = contents
        self._shards = _plan(contents.jobs, shard_bytes)
        self._state = self._plan_state()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(shard.nbytes for shard in self._shards)

    def write(self, progress: Progress | None = None) -> Written:
        """Writes what is not there yet.

        Raises:
            UsageError: the directory holds something else, or another process is writing to it.
            EnvironmentLackError: the disk is full or too small; finished shards stay, the partial one does not.
        """
        self._check_directory()
        self.directory.mkdir(parents=True, exist_ok=True)
        with _lock(self.directory / STATE_NAME, self._state):
            missing = [shard for shard in self._shards if not shard.is_complete(self.directory)]
            self._check_space(missing)
            done = self.nbytes - sum(shard.nbytes for shard in missing)
            for shard in missing:
                with _new_file(self.directory / shard.file, shard.size) as stream:
                    done = shard.write(stream, done, self.nbytes, progress)
            for name, content in self._small_files():
                path = self.directory / name
                if path.is_file() and path.read_bytes() == content:
                    continue
                with _new_file(path, len(content)) as stream:
                    stream.write(content)
        return Written(self.directory, self.nbytes, len(self._shards), len(self._shards) - len(missing))

    def _plan_state(self) -> bytes:
        """What tells one plan from another: the identity, and a digest of all that will be written but weights."""
        digest = hashlib.sha256()
        for shard in self._shards:
            digest.update(shard.file.encode() + shard.header)
        for name, content in self._small_files():
            digest.update(name.encode() + len(content).to_bytes(8, "little") + content)
        return _json({"identity": self._contents.identity, "plan": digest.hexdigest()})

    def _small_files(self) -> Iterator[tuple[str, bytes]]:
        yield from sorted(self._contents.files.items())
        weight_map = {name: shard.file for shard in self._shards for name in shard.places}
        total = sum(shard.nbytes for shard in self._shards)
        yield INDEX_NAME, _json({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))})
        yield "config.json", self._contents.config

    def _check_directory(self) -> None:
        if not self.directory.exists():
            return
        if not self.directory.is_dir():
            raise UsageError(str(self.directory), found="a file", expected="a directory, or nothing")
        state = self.directory / STATE_NAME
        present = sorted(path.name for path in self.directory.iterdir())
        if state.exists():
            found = state.read_bytes()
            if found not in (b"", self._state) and present != [STATE_NAME]:
                raise UsageError(
                    str(self.directory),
                    found=f"a checkpoint made from or in another way: {_difference(found, self._state)}",
                    expected="the one being written now, to resume it",
                    hint="choose another directory, or delete this one",
                )
        elif present:
            raise UsageError(
                str(self.directory),
                found=f"{', '.join(present[:3])}{', ...' if len(present) > 3 else ''}",
                expected="an empty directory, or one in which this work was interrupted",
                hint="choose another directory",
            )

    def _check_space(self, missing: Sequence[_Shard]) -> None:
        needed = sum(shard.size for shard in missing) + sum(len(content) for _, content in self._small_files())
        free = shutil.disk_usage(self.directory).free
        if missing and needed > free:
            raise _disk_full(self.directory, needed, free)


@dataclass(frozen=True)
class _Shard:
    """One file of the plan.

    Attributes:
        file: its name.
        jobs: what makes its tensors.
        header: its first bytes, up to the first tensor.
        places: where each tensor begins in the file.
        size: its bytes.
    """

    file: str
    jobs: Sequence[Job]
    header: bytes
    places: Mapping[str, int]
    size: int

    @property
    def nbytes(self) -> int:
        return self.size - len(self.header)

    def is_complete(self, directory: Path) -> bool:
        path = directory / self.file
        if not path.is_file() or path.stat().st_size != self.size:
            return False
        with path.open("rb") as stream:
            return stream.read(len(self.header)) == self.header

    def write(self, stream: BinaryIO, done: int, total: int, progress: Progress | None) -> int:
        import torch

        stream.write(self.header)
        for job in self.jobs:
            made = job.make()
            for planned in job.tensors:
                payload = made[planned.name].contiguous().reshape(-1).view(torch.uint8)
                assert payload.numel() == planned.nbytes, planned
                stream.seek(self.places[planned.name])
                stream.write(payload.numpy().data)
                done += planned.nbytes
            if progress is not None:
                progress(done, total)
        return done


def _plan(jobs: Sequence[Job], shard_bytes: int) -> tuple[_Shard, ...]:
    groups: list[list[Job]] = [[]]
    size = 0
    for job in jobs:
        nbytes = sum(tensor.nbytes for tensor in job.tensors)
        if groups[-1] and size + nbytes > shard_bytes:
            groups.append([])
            size = 0
        groups[-1].append(job)
        size += nbytes
    names = (f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1))
    return tuple(_lay_out(name, group) for name, group in zip(names, groups, strict=True))


def _lay_out(file: str, jobs: Sequence[Job]) -> _Shard:
    """Wide elements first, which keeps every tensor aligned to its element without gaps."""
    tensors = sorted((tensor for job in jobs for tensor in job.tensors), key=lambda tensor: -BITS[tensor.dtype])
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.nbytes
        table[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    places = {tensor.name: len(header) + table[tensor.name]["data_offsets"][0] for tensor in tensors}
    return _Shard(file, tuple(jobs), header, places, len(header) + end)


@contextmanager
def _new_file(path: Path, size: int) -> Iterator[BinaryIO]:
    """A file that appears under its name only when it is complete and on disk."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with partial.open("wb") as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
        partial.replace(path)
        _sync_directory(path.parent)
    except BaseException as error:
        partial.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise _disk_full(path, size, shutil.disk_usage(path.parent).free) from error
        raise


@contextmanager
def _lock(state: Path, content: bytes) -> Iterator[None]:
    """Holds the directory against other processes, and says in it what is being written."""
    with state.open("a+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UsageError(str(state.parent), found="another process writing to it", expected="none") from error
        stream.truncate(0)
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
        yield


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _disk_full(path: Path, needed: int, free: int) -> EnvironmentLackError:
    return EnvironmentLackError(
        f"disk space for {path}",
        found=f"{free:,} bytes free",
        expected=f"{needed:,} bytes",
        hint="make room or lift the quota, then run the same command again: finished shards are kept",
    )


def _difference(found: bytes, expected: bytes) -> str:
    """The parts of two states that differ."""
    try:
        theirs = json.loads(found)["identity"]
    except (ValueError, KeyError, TypeError):
        return "its state file is damaged"
    ours = json.loads(expected)["identity"]
    differing = [key for key in sorted({*theirs, *ours}) if theirs.get(key) != ours.get(key)]
    return ", ".join(f"another {key}" for key in differing) or "another plan"


def _json(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
