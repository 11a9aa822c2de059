"""Tile sizes by device: tables of what was measured there, the user's own before the packaged one.

A table is JSON, one tuning a line. The packaged ones are `tuned/*.json`; `muster bench MODEL --tune` writes the user's
to MUSTER_HOME/tunings. Where no tuning fits, `triton_tiles.default` answers, and reports say so (`Cuts.tuned`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from muster import env
from muster.device import cuda, shared_memory
from muster.errors import UsageError
from muster.moe.kernels.triton_tiles import SMALLEST_SHARED, Target, Tile, Tiles, by_rows, default
from muster.moe.problem import MoEProblem

PACKAGED = Path(__file__).with_name("tuned")


@dataclass(frozen=True)
class Tuning:
    """The sizes that won for one kind of layer and up to some number of rows per expert.

    Attributes:
        kernels: whose sizes they are (`Facts.tiles`).
        weights: name of the stored format.
        shape: experts on the rank, D and F, as `shape_of` says them; empty: any.
        up_to: slots per expert that it is for at most; None: any number.
        tiles: the sizes.
        microseconds: what a call of the whole layer took with them.
        at: which call that was.
        record: the run that says so.
    """

    kernels: str
    weights: str
    shape: str
    up_to: float | None
    tiles: Tiles
    microseconds: float
    at: str
    record: str

    def fits(self, kernels: str, problem: MoEProblem) -> bool:
        """Whether it is about such a layer."""
        same = (self.kernels, self.weights) == (kernels, problem.weights.name)
        return same and self.shape in ("", shape_of(problem))

    def to_json(self) -> str:
        """One line of a table."""
        fields = asdict(self)
        tiles = fields.pop("tiles")
        cut = {"rows": tiles["rows"], "group": tiles["group"], "gate_up": tiles["first"], "down": tiles["second"]}
        head = {name: fields[name] for name in ("kernels", "weights", "shape", "up_to")}
        return json.dumps({**head, **cut, **{name: fields[name] for name in fields if name not in head}})

    @staticmethod
    def of(line: dict[str, Any]) -> Tuning:
        """What `to_json` wrote; raises whatever comes of something else."""
        fields = dict(line)
        gate_up, down = Tile(**fields.pop("gate_up")), Tile(**fields.pop("down"))
        tiles = Tiles(fields.pop("rows"), fields.pop("group"), gate_up, down)
        return Tuning(**fields, tiles=tiles)


@dataclass(frozen=True)
class Cuts:
    """The sizes for one layer on one device.

    Attributes:
        problem: the layer.
        target: what the sizes are cut for.
        tunings: those about such a layer, in the order in which they are asked.
    """

    problem: MoEProblem
    target: Target
    tunings: tuple[Tuning, ...] = ()

    @property
    def tuned(self) -> bool:
        """Whether anything was measured for such layers here."""
        return bool(self.tunings)

    def each(self, slots: int) -> float:
        """As many slots fall to an expert on average."""
        return slots / self.problem.local_experts

    def tiles(self, slots: int) -> Tiles:
        """For so many slots, whichever experts they fall to."""
        each = self.each(slots)
        measured = (one.tiles for one in self.tunings if one.up_to is None or each <= one.up_to)
        return next(measured, None) or default(self.target, each)

    def of_rows(self, rows: int) -> Tiles:
        """For blocks of that height."""
        measured = (one.tiles for one in self.tunings if one.tiles.rows == rows)
        return next(measured, None) or by_rows(rows, self.target)

    def fixed(self, tiles: Tiles) -> Cuts:
        """The same sizes for any number of slots."""
        tuning = Tuning(self.target.kernels, self.target.weights.name, "", None, tiles, 0.0, "", "")
        return replace(self, tunings=(tuning,))


@dataclass(frozen=True)
class Table:
    """What was measured on one kind of device.

    Attributes:
        device: the vendor's name for it.
        capability: its compute capability, such as "9.0".
        tunings: all of them.
    """

    device: str
    capability: str
    tunings: tuple[Tuning, ...]

    @staticmethod
    def read(path: Path) -> Table:
        """The table of a file.

        Raises:
            UsageError: it holds something else.
        """
        try:
            fields = json.loads(path.read_text(encoding="utf-8"))
            tunings = tuple(Tuning.of(line) for line in fields["tunings"])
            return Table(fields["device"], fields["capability"], tunings)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise UsageError(
                str(path),
                found=f"{type(error).__name__} {error}",
                expected="a table of tile sizes",
                hint="delete it; muster bench MODEL --tune writes a new one",
            ) from error

    def write(self, path: Path) -> None:
        """Writes the table, whole or not at all."""
        lines = ",\n".join(f"  {tuning.to_json()}" for tuning in self.tunings)
        head = f'"device": {json.dumps(self.device)}, "capability": {json.dumps(self.capability)}'
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(f".{os.getpid()}")
        partial.write_text(f'{{{head}, "tunings": [\n{lines}\n]}}\n', encoding="utf-8")
        partial.replace(path)

    def with_(self, fresh: Sequence[Tuning]) -> Table:
        """The table with these instead of all that it has about the same kernels, formats and shapes."""
        about = {(one.kernels, one.weights, one.shape) for one in fresh}
        kept = (one for one in self.tunings if (one.kernels, one.weights, one.shape) not in about)
        return Table(self.device, self.capability, (*kept, *fresh))


def shape_of(problem: MoEProblem) -> str:
    """What decides, beside the format, which sizes are fast."""
    return f"L{problem.local_experts} D{problem.hidden} F{problem.inner}"


def own_path(home: Path, device: str) -> Path:
    """The user's table of a device."""
    return home / "tunings" / _file(device)


def tunings(device: str, home: Path) -> tuple[Tuning, ...]:
    """Everything measured on a device, in the order in which it is asked: the user's, of one shape, for few rows first.

    Raises:
        UsageError: a table that cannot be read.
    """
    paths = (own_path(home, device), PACKAGED / _file(device))
    return tuple(one for path in paths if path.exists() for one in sorted(Table.read(path).tunings, key=_order))


def digest(kernels: str, device: str, home: Path) -> str:
    """Of all that decides which sizes some kernels run with on a device, in a few digits; "none" where nothing does."""
    mine = [one for one in tunings(device, home) if one.kernels == kernels]
    text = "\n".join(repr((one.weights, one.shape, one.up_to, one.tiles)) for one in mine)
    return hashlib.sha256(text.encode()).hexdigest()[:12] if mine else "none"


def cuts(problem: MoEProblem, kernels: str) -> Cuts:
    """The sizes of a layer for some kernels on this process's GPU."""
    known, capability, shared = _here()
    target = Target(kernels, problem.weights, capability, shared)
    return Cuts(problem, target, tuple(one for one in known if one.fits(kernels, problem)))


def configurations(target: Target) -> tuple[Tiles, ...]:
    """All sizes that a layer can be given on GPUs of such a compute capability, the user's tables aside."""
    heights = (default(target, each) for each in (1, 64, 1024))
    # A runner core's blocks are of one height whatever the number of slots.
    cores = (by_rows(64, target),)
    packaged = (one for table in _packaged() if table.capability == target.capability for one in table.tunings)
    about = (target.kernels, target.weights.name)
    measured = (one.tiles for one in packaged if (one.kernels, one.weights) == about)
    return tuple(dict.fromkeys((*heights, *cores, *measured)))


def _packaged() -> Iterable[Table]:
    return (Table.read(path) for path in sorted(PACKAGED.glob("*.json")))


def _order(tuning: Tuning) -> tuple[bool, float]:
    return not tuning.shape, float("inf") if tuning.up_to is None else tuning.up_to


def _file(device: str) -> str:
    return "-".join("".join(c if c.isalnum() else " " for c in device.lower()).split()) + ".json"


@cache
def _here() -> tuple[tuple[Tuning, ...], str, int]:
    """What is known of this process's GPU, its key and its shared memory; on Triton's interpreter there is none."""
    if not torch.cuda.is_available():
        return (), "", SMALLEST_SHARED
    device = cuda()
    return tunings(device.name, env.read().home), device.key, shared_memory()
