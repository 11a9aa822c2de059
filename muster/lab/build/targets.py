"""Which matrices of a checkpoint `muster quantize` quantises, and under which names it writes them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from muster.checkpoint import shapes
from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.names import ExpertNames, Names, grouped
from muster.checkpoint.quant import Survey
from muster.checkpoint.spec import MoESpec
from muster.errors import CheckpointError, UsageError
from muster.formats.spec import FP8_BLOCK, Format

_LEFT_ALONE = ("in_proj_a", "in_proj_b", "in_proj_ba", "conv1d", "weights_proj")
"""Matrices of attention blocks that releases leave unquantised: narrow, or no linear layers."""


@dataclass(frozen=True)
class Target:
    """One matrix to quantise.

    Attributes:
        module: the name to write it under.
        tensor: the tensor that holds it.
        rows, columns: its shape.
        expert: its place in a stacked tensor.
        first_row: where it begins in a tensor of fused rows.
        fused: kernels read it and the matrix below it as one.
    """

    module: str
    tensor: str
    rows: int
    columns: int
    expert: int | None = None
    first_row: int = 0
    fused: bool = False

    def read(self, index: CheckpointIndex) -> Tensor:
        """The matrix, mapped from its file."""
        tensor = index.read(self.tensor)
        if self.expert is not None:
            tensor = tensor[self.expert]
        return tensor[self.first_row : self.first_row + self.rows]


def find_targets(names: Names, survey: Survey, *, linears: bool) -> tuple[Target, ...]:
    """The routed experts of every layer; with `linears`, attention, dense and shared feed-forward matrices too.

    Routers, norms, embeddings, the output head and draft layers are never among them.

    Raises:
        CheckpointError: expert matrices that the files lack or hold in another shape, all of them.
        UsageError: a family whose expert layers can only be written as they were published.
    """
    problems: list[CheckpointError] = []
    targets: list[Target] = []
    for layer, spec in enumerate(names.spec.layers):
        root = names.layer(layer)
        if isinstance(spec.feed_forward, MoESpec):
            targets += _experts(names, survey, root, spec.feed_forward, problems)
        if linears:
            targets += _linears(names, survey, layer)
    error = CheckpointError.gather("expert layers", problems)
    if error is not None:
        raise error
    return tuple(targets)


def check_cuts(targets: tuple[Target, ...], format: Format) -> None:
    """Refuses matrices that the format's blocks do not fit.

    Raises:
        UsageError: every such matrix.
    """
    block_rows, block_columns = format.block or (1, 1)
    wrong: dict[tuple[str, str], list[str]] = {}
    for target in targets:
        if format.element.bits == 4 and target.columns % block_columns:
            what = (f"{target.columns} columns", f"a multiple of {block_columns}")
            wrong.setdefault(what, []).append(target.module)
        if format is FP8_BLOCK and target.fused and target.rows % block_rows:
            what = (f"{target.rows} rows", f"a multiple of {block_rows}: gate and up are read as one matrix")
            wrong.setdefault(what, []).append(target.module)
    problems = [
        UsageError(name, found=found, expected=expected)
        for (found, expected), modules in wrong.items()
        for name in grouped(modules, "matrices")
    ]
    error = UsageError.gather(f"matrices that {format.name} cannot cut", problems, hint="choose another format")
    if error is not None:
        raise error


def _experts(
    names: Names, survey: Survey, root: str, moe: MoESpec, problems: list[CheckpointError]
) -> Iterator[Target]:
    for paths in names.family.experts:
        experts = f"{root}.{paths.experts}"
        if f"{experts}.{paths.gate_up_stacked}" in survey.modules:
            yield from _stacked(names, survey, experts, paths, moe, problems)
            return
        if f"{experts}.0.{paths.down}" in survey.modules:
            yield from _single(names, survey, experts, paths, moe, problems)
            return
    expected = " or ".join(f"{root}.{paths.experts}" for paths in names.family.experts)
    problems.append(CheckpointError(f"experts of {root}", found="none", expected=f"{moe.experts} under {expected}"))


def _single(
    names: Names, survey: Survey, experts: str, paths: ExpertNames, moe: MoESpec, problems: list[CheckpointError]
) -> Iterator[Target]:
    hidden = names.spec.hidden
    shapes = {
        paths.gate: (moe.inner, hidden),
        paths.up: (moe.inner, hidden),
        paths.down: (hidden, moe.inner),
    }
    if moe.activation == "relu2":
        del shapes[paths.gate]
    for expert in range(moe.experts):
        for part, shape in shapes.items():
            module = f"{experts}.{expert}.{part}"
            if _has_shape(survey, module, shape, problems):
                tensor = survey.modules[module].parts["weight"]
                yield Target(module, tensor, *shape, fused=part != paths.down)


def _stacked(
    names: Names, survey: Survey, experts: str, paths: ExpertNames, moe: MoESpec, problems: list[CheckpointError]
) -> Iterator[Target]:
    if paths.transposed or paths.interleaved or moe.bias:
        raise UsageError(
            f"{experts}.{paths.gate_up_stacked}",
            found="interleaved, transposed or biased expert matrices",
            expected="gate rows above up rows",
            hint=f"{names.spec.architecture} is published quantised; use that release",
        )
    hidden, inner = names.spec.hidden, moe.inner
    gate_up, down = f"{experts}.{paths.gate_up_stacked}", f"{experts}.{paths.down_stacked}"
    fits = _has_shape(survey, gate_up, (moe.experts, 2 * inner, hidden), problems)
    if not (_has_shape(survey, down, (moe.experts, hidden, inner), problems) and fits):
        return
    gate_up, down = survey.modules[gate_up].parts["weight"], survey.modules[down].parts["weight"]
    for expert in range(moe.experts):
        root = f"{experts}.{expert}"
        yield Target(f"{root}.{paths.gate}", gate_up, inner, hidden, expert, fused=True)
        yield Target(f"{root}.{paths.up}", gate_up, inner, hidden, expert, first_row=inner, fused=True)
        yield Target(f"{root}.{paths.down}", down, hidden, inner, expert)


def _has_shape(survey: Survey, module: str, shape: tuple[int, ...], problems: list[CheckpointError]) -> bool:
    stored = survey.modules.get(module)
    if stored is not None and stored.shape == shape:
        return True
    found = "no such matrix" if stored is None else str(list(stored.shape))
    problems.append(CheckpointError(module, found=found, expected=str(list(shape))))
    return False


def _linears(names: Names, survey: Survey, layer: int) -> Iterator[Target]:
    for parameter in shapes.decoder_layer(names, layer, stacked=False):
        module = parameter.module
        stored = survey.modules.get(module) if parameter.linear else None
        if stored is not None and len(stored.shape) == 2 and module.rpartition(".")[2] not in _LEFT_ALONE:
            yield Target(module, stored.parts["weight"], *stored.shape)
