"""What a checkpoint directory holds: every tensor's place, read from safetensors headers alone; bytes on demand."""

from __future__ import annotations

import gc
import mmap
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from muster.checkpoint.header import (
    Header,
    TensorEntry,
    is_lfs_pointer,
    lfs_pointer,
    parse_json,
    read_header,
    unreadable,
)
from muster.checkpoint.names import grouped, shown
from muster.errors import CheckpointError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["CheckpointIndex", "TensorEntry"]

INDEX_NAME = "model.safetensors.index.json"
_LONGEST_INDEX = 1 << 30
_READERS = 8
_WORTH_A_THREAD = 8 << 20
_FOREIGN = (".bin", ".pt", ".pth", ".gguf", ".ckpt", ".npz", ".onnx")


class CheckpointIndex:
    """The tensors of a checkpoint directory.

    Attributes:
        directory: the checkpoint.
        tensors: every tensor by name, in the order of the files.
    """

    def __init__(self, directory: Path, tensors: Mapping[str, TensorEntry]) -> None:
        self.directory = directory
        self.tensors = MappingProxyType(dict(tensors))
        self._maps: dict[Path, Tensor] = {}

    @classmethod
    def open(cls, directory: Path) -> CheckpointIndex:
        """Reads and checks the headers of all files; no weight is read.

        The files are those that `model.safetensors.index.json` lists, under whatever names, or the only
        safetensors file of the directory.

        Raises:
            CheckpointError: everything that is wrong with the directory, the index and the files, at once.
        """
        directory = Path(directory)
        files = _files_of(directory)
        present = [path for path in files if path.name.endswith(".safetensors")]
        index, problems = _index_file(directory, files)
        with collector_at_rest():
            if index is not None:
                headers, problems = _listed(index, present)
            else:
                headers = [read_header(path) for path in present]
                if len(present) != 1:
                    problems.append(_no_index(directory, files, present))
            tensors, disagreements = _union(headers)
        problems += [problem for header in headers for problem in header.problems]
        error = CheckpointError.gather(f"checkpoint {directory}", problems + disagreements)
        if error is not None:
            raise error
        return cls(directory, tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(entry.end - entry.begin for entry in self.tensors.values())

    def entry(self, name: str) -> TensorEntry:
        """The place of a tensor.

        Raises:
            CheckpointError: there is no such tensor.
        """
        entry = self.tensors.get(name)
        if entry is None:
            raise CheckpointError(f"{self.directory}: {shown(name)}", found="no such tensor")
        return entry

    def read(self, name: str) -> Tensor:
        """A tensor, mapped from its file: nothing is copied, pages are read when touched.

        The mapping is private: writing to the tensor never changes the file. A tensor whose place in the file is not
        aligned to its element size is copied.

        Raises:
            CheckpointError: no such tensor, or a dtype that torch lacks.
        """
        import torch

        entry = self.entry(name)
        dtype = torch_dtype(entry)
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=dtype)
        flat = self._map(entry.file)[entry.begin : entry.end]
        if entry.begin % dtype.itemsize:
            flat = flat.clone()
        return flat.view(dtype).view(entry.shape)

    def copy_into(self, jobs: Sequence[tuple[str, Tensor]]) -> None:
        """Reads tensors by name straight into other memory, without mapping it: contiguous, of the same bytes.

        Raises:
            CheckpointError: no such tensor, or the file was cut short since it was opened.
        """
        places = [(self.entry(name), out) for name, out in jobs]
        size = sum(entry.nbytes for entry, _ in places)
        workers = max(1, min(_READERS, size // _WORTH_A_THREAD))
        with ExitStack() as stack:
            files = {
                file: stack.enter_context(file.open("rb")).fileno() for file in {entry.file for entry, _ in places}
            }
            if workers == 1:
                _copy(files, places)
                return
            pool = stack.enter_context(ThreadPoolExecutor(workers))
            shares = (places[worker::workers] for worker in range(workers))
            list(pool.map(partial(_copy, files), shares))

    def _map(self, file: Path) -> Tensor:
        import torch

        if file not in self._maps:
            with file.open("rb") as stream:
                mapped = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
            self._maps[file] = torch.frombuffer(mapped, dtype=torch.uint8)
        return self._maps[file]


def _copy(files: Mapping[Path, int], places: Sequence[tuple[TensorEntry, Tensor]]) -> None:
    import torch

    for entry, out in places:
        assert out.nbytes == entry.nbytes, (entry, out.shape)
        if entry.nbytes == 0:
            continue
        buffer = out.view(-1).view(torch.uint8).numpy().data
        at = 0
        while at < entry.nbytes:
            got = os.preadv(files[entry.file], [buffer[at:]], entry.begin + at)
            if got == 0:
                raise CheckpointError(
                    f"{entry.file}: {shown(entry.name)}",
                    found="the end of the file",
                    expected=f"{entry.nbytes:,} bytes at {entry.begin:,}",
                    hint="was the file changed while it was read?",
                )
            at += got


def torch_dtype(entry: TensorEntry) -> torch.dtype:
    """The torch dtype of a stored tensor.

    Raises:
        CheckpointError: torch has none (4-bit and 6-bit elements).
    """
    import torch

    names = {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
        "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "C64": torch.complex64,
    }
    if entry.dtype not in names:
        raise CheckpointError(
            f"{entry.file}: {shown(entry.name)}: dtype", found=entry.dtype, expected=f"one of {', '.join(names)}"
        )
    return names[entry.dtype]


@contextmanager
def collector_at_rest() -> Iterator[None]:
    """Headers make a million containers and no cycle; looking for cycles would take as long as the rest."""
    active = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if active:
            gc.enable()


def _files_of(directory: Path) -> list[Path]:
    """What the directory holds.

    Raises:
        CheckpointError: it is none, or cannot be read.
    """
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError) as error:
        found = "a file" if isinstance(error, NotADirectoryError) else "nothing"
        raise CheckpointError(str(directory), found=found, expected="a checkpoint directory") from error
    except OSError as error:
        raise unreadable(directory, error, "a directory") from error


def _index_file(directory: Path, files: Sequence[Path]) -> tuple[Path | None, list[CheckpointError]]:
    """The index, or None; and what is wrong when there are several and none has the usual name."""
    indexes = [path for path in files if path.name.endswith(".safetensors.index.json")]
    usual = [path for path in indexes if path.name == INDEX_NAME]
    if len(indexes) > 1 and not usual:
        found = f"{len(indexes)} indexes: {_files(indexes)}"
        return None, [CheckpointError(str(directory), found=found, expected=f"one, named {INDEX_NAME}")]
    return next(iter(usual or indexes), None), []


def _no_index(directory: Path, files: Sequence[Path], present: Sequence[Path]) -> CheckpointError:
    if present:
        return CheckpointError(
            f"checkpoint {directory}",
            found=f"{len(present)} safetensors files and no index: {_files(present)}",
            expected=f"{INDEX_NAME}, which says what each file holds, or a single file",
            hint=f"download {INDEX_NAME}; leave out files that are not part of the checkpoint",
        )
    foreign = [path for path in files if path.suffix in _FOREIGN]
    return CheckpointError(
        f"checkpoint {directory}",
        found=f"no safetensors file, only {_files(foreign)}" if foreign else "no safetensors file",
        expected=f"model.safetensors, or shards with {INDEX_NAME}",
        hint="download or convert the checkpoint to safetensors" if foreign else "",
    )


def _files(paths: Sequence[Path]) -> str:
    names = [shown(path.name) for path in paths[:6]]
    return ", ".join(names) + (f" and {len(paths) - 6} more" if len(paths) > 6 else "")


def _listed(index: Path, present: Sequence[Path]) -> tuple[list[Header], list[CheckpointError]]:
    """The headers of the files that the index lists, and how index and directory disagree."""
    weight_map, total, problems = _read_index(index)
    if weight_map is None:
        return [read_header(path) for path in present], problems
    expected = Counter(weight_map.values())
    headers: list[Header] = []
    plain = _plain_names(expected)
    for file, count in expected.items():
        if file not in plain:
            problems.append(
                CheckpointError(
                    f"{index}: weight_map",
                    found=f"file name {shown(repr(file))} ({count:,} tensors)",
                    expected="the name of a .safetensors file in the same directory",
                )
            )
        elif not (index.parent / file).is_file():
            problems.append(
                CheckpointError(
                    str(index.parent / file),
                    found="no such file",
                    expected=f"a shard with {count:,} tensors, by {index.name}",
                    hint="download it",
                )
            )
        else:
            headers.append(read_header(index.parent / file))

    problems += [
        CheckpointError(
            str(path),
            found=f"a file that {index.name} does not list",
            expected=f"the files it lists: {_files([Path(file) for file in expected])}",
            hint="move it away if it belongs to another checkpoint, else list its tensors",
        )
        for path in present
        if path.name not in expected
    ]
    problems += _map_problems(index, weight_map, expected, headers)
    if total is not None and not problems and not any(header.problems for header in headers):
        held = sum(entry.end - entry.begin for header in headers for entry in (header.entries or {}).values())
        if held != total:
            problems.append(
                CheckpointError(
                    f"{index}: metadata.total_size", found=f"{total:,}", expected=f"{held:,}, the bytes of all tensors"
                )
            )
    return headers, problems


def _plain_names(files: Mapping[str, object]) -> set[str]:
    """The file names that cannot lead out of the directory."""
    return {f for f in files if f.endswith(".safetensors") and f.isprintable() and not set(f) & {"/", "\\", ":"}}


def _read_index(index: Path) -> tuple[dict[str, str] | None, int | None, list[CheckpointError]]:
    """The index's weight_map and total_size, None where they cannot be had."""
    try:
        size = index.stat().st_size
        text = index.read_bytes() if size <= _LONGEST_INDEX else b""
    except OSError as error:
        return None, None, [unreadable(index, error)]
    if is_lfs_pointer(text):
        return None, None, [lfs_pointer(index, text, size)]
    try:
        content = parse_json(text)
    except ValueError as error:
        return None, None, [CheckpointError(str(index), found=shown(str(error)), expected="a JSON object")]
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or set(map(type, weight_map.values())) != {str}:
        return (
            None,
            None,
            [
                CheckpointError(
                    str(index), found="no usable weight_map", expected="weight_map: tensor name -> file name"
                )
            ],
        )
    metadata = content.get("metadata")
    total = metadata.get("total_size") if isinstance(metadata, dict) else None
    return weight_map, int(total) if isinstance(total, (int, float)) and 0 <= total < 1 << 62 else None, []


def _map_problems(
    index: Path, weight_map: Mapping[str, str], expected: Mapping[str, int], headers: Sequence[Header]
) -> list[CheckpointError]:
    """Tensors that the index places in a file that lacks them, and tensors that it does not place there."""
    readable = {header.file.name: header.entries for header in headers if header.entries is not None}
    unlike = {
        file
        for file, entries in readable.items()
        if len(entries) != expected[file] or set(map(weight_map.get, entries)) - {file}
    }
    if not unlike:
        return []
    holder = {name: file for file, entries in readable.items() for name in entries}
    missing: dict[tuple[str, str | None], list[str]] = {}
    unlisted: dict[str, list[str]] = {}
    for file in sorted(unlike):
        for name, place in weight_map.items():
            if place == file and name not in readable[file]:
                missing.setdefault((file, holder.get(name)), []).append(name)
        extra = [name for name in readable[file] if name not in weight_map]
        if extra:
            unlisted[file] = extra
    problems = [
        CheckpointError(
            f"{index.name} and {file} disagree on {group}",
            found=f"it in {other}" if other else "it in no file",
            expected=f"it in {file}, by {index.name}",
        )
        for (file, other), names in missing.items()
        for group in grouped(names)
    ]
    problems += [
        CheckpointError(
            f"{index.name} and {file} disagree on {group}", found=f"it in {file}", expected="it in the weight_map"
        )
        for file, names in unlisted.items()
        for group in grouped(names)
    ]
    return problems


def _union(headers: Sequence[Header]) -> tuple[dict[str, TensorEntry], list[CheckpointError]]:
    """All tensors of all files, and the names that two files share."""
    tensors: dict[str, TensorEntry] = {}
    twice: dict[tuple[str, str], list[str]] = {}
    for header in headers:
        entries = header.entries or {}
        if not tensors.keys().isdisjoint(entries):
            for name in tensors.keys() & entries.keys():
                twice.setdefault((tensors[name].file.name, header.file.name), []).append(name)
        tensors.update(entries)
    return tensors, [
        CheckpointError(group, found=f"it in both {first} and {second}", expected="it in one file")
        for (first, second), names in twice.items()
        for group in grouped(names)
    ]
