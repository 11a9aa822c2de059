"""Tile sizes of Triton's grouped products: what they are, what fits, what to begin with and what else to try."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from muster.formats.spec import Format

TOKENS = "triton"
E4M3_TOKENS = "triton_w8a8"
"""Whose sizes they are: products of tokens in bf16, and of tokens in e4m3."""
SMALLEST_SHARED = 99 << 10
"""Shared memory of a program, bytes: the least among GPUs from compute capability 8.0 on (8.6, 8.9, 12.0)."""
ROWS = (16, 32, 64, 128)
"""Block heights that the kernels can have."""
_NEIGHBOURS = 8
"""Blocks that share a tile, from 64 rows on: lower ones are seldom of one expert."""
_PAIRS = 64
"""Half the depth of a step of 4-bit weights: what their layout gives where the columns allow it."""
_TALL = 64
_TALLEST = 128
_MOST_SUMS = 128
"""Sums that a thread has registers for beside the rest."""


@dataclass(frozen=True)
class Tile:
    """The tile of one product.

    Attributes:
        columns: of the output (gate_up: as many gate and as many up rows).
        half: half the depth of a step; of 4-bit weights it is what their layout gives, whatever this says.
        warps: per program.
        stages: of the software pipeline.
    """

    columns: int
    half: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """Both products of a layer.

    Attributes:
        rows: slots of a block.
        group: neighbouring blocks that share a tile while it is in the second cache.
        first, second: gate_up and down.
    """

    rows: int
    group: int
    first: Tile
    second: Tile


@dataclass(frozen=True)
class Target:
    """What tiles are cut for: the kernels, the weights and the GPU.

    Attributes:
        kernels: whose sizes they are (`Facts.tiles`).
        weights: the stored format.
        capability: the GPU's, such as "9.0"; elsewhere, anything else.
        shared: bytes of shared memory that a program may have.
    """

    kernels: str
    weights: Format
    capability: str
    shared: int

    @property
    def packed(self) -> bool:
        """Codes lie in pairs."""
        return self.weights.element.bits == 4

    @property
    def partial(self) -> bool:
        """Sums over some columns are scaled before they are added to the others: there are twice as many."""
        return self.kernels == E4M3_TOKENS or self.weights.family in ("fp8-block", "int4")

    def fits(self, tiles: Tiles) -> bool:
        """Whether neither product needs more shared memory or more registers than there are."""
        return all(
            self._shared(tiles.rows, columns, tile) <= self.shared
            and self._sums(tiles.rows, columns, tile) <= _MOST_SUMS
            for columns, tile in ((2 * tiles.first.columns, tiles.first), (tiles.second.columns, tiles.second))
        )

    def _shared(self, rows: int, columns: int, tile: Tile) -> int:
        """A bound: every stage holds the step of both operands as they come, and beside them lies one that is decoded.

        What Triton takes for 9.0 is equal to it for bf16 and a tenth below it for others; for 8.0 it is up to a half
        below; tokens in e4m3 take half of what is counted.
        """
        depth = 2 * (_PAIRS if self.packed else tile.half)
        decoded = 2 * columns * depth if self.weights.quantised else 0
        return tile.stages * (2 * rows * depth + self.weights.bytes(columns, depth)) + decoded

    def _sums(self, rows: int, columns: int, tile: Tile) -> int:
        """Of one thread."""
        return rows * columns * (2 if self.partial else 1) // (32 * tile.warps)


def default(target: Target, each: float) -> Tiles:
    """Sizes that do well on what was measured, an H200, on any GPU.

    Blocks of 128 rows have as many sums as fit beside everything else on 9.0: where a tensor core wants its operands in
    registers (8.0), or sums are copied there (10.0), or there are twice as many, threads would spill them.

    Args:
        target: what for.
        each: slots per expert.
    """
    if each > 96 and target.capability == "9.0" and not target.partial:
        return by_rows(_TALLEST, target)
    return by_rows(_TALL if each > 16 else 16, target)


def by_rows(rows: int, target: Target) -> Tiles:
    """Sizes for blocks of 16, 64 or 128 rows."""
    if rows == _TALLEST:
        return Tiles(rows, _NEIGHBOURS, Tile(128, 32, 8, 3), Tile(256, 32, 8, 3))
    if rows == _TALL:
        pair = (Tile(32, 64, 4, 3), Tile(64, 64, 4, 3)) if target.packed else (Tile(64, 32, 4, 4), Tile(128, 32, 4, 4))
        return Tiles(rows, _NEIGHBOURS, *pair)
    pair = (Tile(32, 64, 4, 4), Tile(64, 64, 4, 4)) if target.packed else (Tile(16, 64, 4, 4), Tile(32, 64, 4, 4))
    return Tiles(rows, 1, *pair)


def candidates(target: Target, each: float) -> tuple[Tiles, ...]:
    """Sizes worth timing for `each` slots per expert, the default first; none that does not fit.

    Both products have the same cut, `down` twice as wide, as `gate_up` counts gate and up rows once; `crossed` takes
    the winner apart.
    """
    tried = (
        Tiles(rows, _NEIGHBOURS if rows >= _TALL else 1, cut, _doubled(cut))
        for rows in ROWS
        if min(each / 8, _TALL) <= rows <= max(32.0, 4 * each)
        for cut in _cuts(rows, target)
    )
    return tuple(dict.fromkeys((default(target, each), *filter(target.fits, tried))))


def crossed(best: Tiles, target: Target) -> tuple[Tiles, ...]:
    """The best so far and, of each product alone, every other cut for blocks of its height."""
    cuts = tuple(_cuts(best.rows, target))
    first = (replace(best, first=cut) for cut in cuts)
    second = (replace(best, second=_doubled(cut)) for cut in cuts)
    return tuple(dict.fromkeys((best, *filter(target.fits, (*first, *second)))))


def _cuts(rows: int, target: Target) -> Iterator[Tile]:
    """A step is 128 columns at most: as many share a scale of FP8 blocks, and of tokens in e4m3."""
    depths = (_PAIRS,) if target.packed else (32, 64)
    widths = (32, 64, 128) if rows >= _TALL else (16, 32, 64)
    for columns, half, stages in product(widths, depths, (3, 4)):
        yield Tile(columns, half, 8 if rows * columns >= 128 * 64 else 4, stages)


def _doubled(cut: Tile) -> Tile:
    return replace(cut, columns=2 * cut.columns)
