"""`muster quantize`: a checkpoint with quantised experts, streamed matrix by matrix from an unquantised one."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from muster.checkpoint.config import CONFIG, read_spec
from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.names import Names, grouped
from muster.checkpoint.quant import Survey, survey
from muster.checkpoint.spec import ModelSpec
from muster.checkpoint.writer import SHARD_BYTES, CheckpointWriter, Contents, Job, PlannedTensor, Progress
from muster.errors import FormatError, UsageError
from muster.formats.dialects import Dialect, disk_shape
from muster.lab.progress import byte_progress
from muster.lab.build.recipes import RECIPES, Recipe
from muster.lab.build.targets import Target, check_cuts, find_targets

_WEIGHTS = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".onnx", ".h5", ".msgpack", ".npz")
_LARGEST_COPIED = 64 << 20


@dataclass(frozen=True)
class Summary:
    """What was written.

    Attributes:
        directory: the new checkpoint.
        format: the recipe's name.
        matrices: how many were quantised.
        nbytes, source_nbytes: bytes of all tensors, after and before.
        shards: safetensors files.
        kept: how many of them an earlier, interrupted call had finished.
        not_copied: files of the source that were left behind: other weights, subdirectories, files over 64 MiB.
    """

    directory: str
    format: str
    matrices: int
    nbytes: int
    source_nbytes: int
    shards: int
    kept: int
    not_copied: tuple[str, ...]


def quantize(
    source: Path,
    format: str,
    out: Path,
    *,
    linears: bool = False,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress | None = None,
) -> Summary:
    """Writes `source` to `out` with its routed experts quantised; an interrupted call resumes.

    Memory stays around one matrix: source tensors are mapped, results go straight to their shard.

    Args:
        source: an unquantised checkpoint directory.
        format: `nvfp4` (modelopt), `nvfp4-ct` (compressed-tensors), `mxfp4` (compressed-tensors) or `fp8-block`.
        out: a directory that does not exist, is empty, or in which the same work was interrupted.
        linears: quantise attention, dense and shared feed-forward matrices too.
        shard_bytes: tensors' bytes per file.
        progress: called with bytes written and bytes in all.

    Raises:
        UsageError: an unknown format, `out` is `source` or holds something else, matrices already quantised or of
            sizes that the format cannot cut.
        CheckpointError, ConfigError: the source is no sound checkpoint.
        FormatError: weights that are not finite.
        EnvironmentLackError: too little disk space.
    """
    recipe = RECIPES.get(format)
    if recipe is None:
        raise UsageError("--format", found=repr(format), expected=f"one of {', '.join(RECIPES)}")
    if out.resolve() == source.resolve():
        raise UsageError("--output", found=f"{out}, the source itself", expected="another directory")
    spec, index = read_spec(source), CheckpointIndex.open(source)
    stored = survey(index, spec)
    _check_unquantised(spec, stored)
    targets = find_targets(Names(spec), stored, linears=linears)
    check_cuts(targets, recipe.format)

    copied, not_copied = _small_files(source)
    contents = Contents(
        jobs=tuple(_jobs(index, targets, recipe)),
        files=copied,
        config=_config(source, recipe, _left_alone(stored, targets)),
        identity={"source": _identity(index), "format": format, "linears": linears, "shard size": shard_bytes},
    )
    written = CheckpointWriter(out, contents, shard_bytes).write(progress)
    return Summary(
        str(out), format, len(targets), written.nbytes, index.nbytes, written.shards, written.kept, not_copied
    )


def command(model: Path, *, output: Path, format: str, linears: bool, json: bool) -> None:
    """The command: the new directory (or one JSON document) on stdout, all else on stderr."""
    with byte_progress(f"quantising to {format}") as progress:
        summary = quantize(model, format, output, linears=linears, progress=progress)
    if json:
        sys.stdout.write(jsonlib.dumps(asdict(summary)) + "\n")
        return
    kept = f", {summary.kept} of them from before" if summary.kept else ""
    sys.stderr.write(
        f"{summary.matrices} matrices in {format}: {summary.nbytes / 1e9:.3f} GB in {summary.shards} shards{kept} "
        f"(source {summary.source_nbytes / 1e9:.3f} GB)\n"
    )
    if summary.not_copied:
        sys.stderr.write(f"not copied: {', '.join(summary.not_copied)}\n")
    sys.stdout.write(f"{output}\n")


def _check_unquantised(spec: ModelSpec, stored: Survey) -> None:
    quantised = [name for name, module in stored.modules.items() if module.dialect is not Dialect.PLAIN]
    problems = [
        UsageError(name, found=stored.modules[quantised[0]].format.name, expected="bf16, f16 or f32")
        for name in grouped(quantised, "modules")
    ]
    if spec.quant is not None:
        problems.append(UsageError(spec.quant.source, found=spec.quant.method, expected="no quantisation"))
    hint = "quantise the checkpoint that this one was made from"
    error = UsageError.gather("the source is already quantised", problems, hint=hint)
    if error is not None:
        raise error


def _jobs(index: CheckpointIndex, targets: Sequence[Target], recipe: Recipe) -> Iterator[Job]:
    """The source's tensors in their order: copied, or quantised where they hold targets."""
    by_tensor: dict[str, list[Target]] = {}
    for target in targets:
        by_tensor.setdefault(target.tensor, []).append(target)
    for name, entry in index.tensors.items():
        if name in by_tensor:
            yield from (_quantise_job(index, target, recipe) for target in by_tensor[name])
        else:
            yield Job((PlannedTensor(name, entry.dtype, entry.shape),), partial(_copy, index, name))


def _copy(index: CheckpointIndex, name: str) -> Mapping[str, Tensor]:
    return {name: index.read(name)}


def _quantise_job(index: CheckpointIndex, target: Target, recipe: Recipe) -> Job:
    shape = (target.rows, target.columns)
    planned = tuple(
        PlannedTensor(
            recipe.dialect.tensor_name(target.module, part.name),
            part.dtypes[0],
            disk_shape(recipe.dialect, part, shape, recipe.format),
        )
        for part in recipe.parts
    )
    return Job(planned, partial(_quantise, index, target, recipe))


def _quantise(index: CheckpointIndex, target: Target, recipe: Recipe) -> Mapping[str, Tensor]:
    try:
        parts = recipe.quantise(target.read(index))
    except FormatError as error:
        raise FormatError(target.tensor, found=error.found, expected=error.expected) from error
    return {recipe.dialect.tensor_name(target.module, name): tensor for name, tensor in parts.items()}


def _left_alone(stored: Survey, targets: Sequence[Target]) -> list[str]:
    """The linear modules that stay as they are: every matrix but targets and embeddings."""
    sources = {target.tensor for target in targets}
    return sorted(
        name
        for name, module in stored.modules.items()
        if not sources.intersection(module.parts.values()) and not name.endswith("embed_tokens")
    )


def _config(source: Path, recipe: Recipe, ignore: Sequence[str]) -> bytes:
    config: dict[str, Any] = jsonlib.loads((source / CONFIG).read_bytes())
    return (jsonlib.dumps({**config, "quantization_config": recipe.config(ignore)}, indent=2) + "\n").encode()


def _small_files(source: Path) -> tuple[dict[str, bytes], tuple[str, ...]]:
    """Tokenizer, generation config and the like, and the names of what is not copied."""
    copied, left = {}, []
    for path in sorted(source.iterdir()):
        if path.name == CONFIG or path.name.startswith(".") or path.name.endswith((".safetensors", ".index.json")):
            continue
        if path.is_file() and not path.name.endswith(_WEIGHTS) and path.stat().st_size <= _LARGEST_COPIED:
            copied[path.name] = path.read_bytes()
        else:
            left.append(path.name)
    return copied, tuple(left)


def _identity(index: CheckpointIndex) -> dict[str, list[int]]:
    """Size and time of change of each weight file: cheap, and another download or edit shows in it."""
    files = sorted({entry.file for entry in index.tensors.values()})
    return {file.name: [file.stat().st_size, file.stat().st_mtime_ns] for file in files}
