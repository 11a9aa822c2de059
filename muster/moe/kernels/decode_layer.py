"""An expert layer of 4-bit or FP8 weights for few tokens: fragments, and a kernel compiled per shape."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.formats.spec import Element, Format
from muster.moe.backend import Routed
from muster.moe.kernels.fragments import CHUNK, FragmentLayer, Fragments, activation_constants, format_constants
from muster.moe.kernels.nvrtc import Kernel, options
from muster.moe.kernels.triton_blocks import list_blocks
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace

SHARED, SOURCE = (Path(__file__).with_name(name) for name in ("fragments.cu", "decode.cu"))
FEW_SLOTS = 128
"""Up to so many slots each finds its own block by looking at all others, inside the products."""


@dataclass(frozen=True)
class Shape:
    """How a product is cut.

    Attributes:
        across: warps that share the columns.
        down: warps that share the rows.
        tiles: of 16 rows per warp.
        ahead: chunks in flight per warp.
    """

    across: int
    down: int
    tiles: int
    ahead: int


MANY_TILES = 4000
"""Tiles of 16 rows from which on there is one for every warp."""
DEEP = 32
"""Chunks of columns from which on a warp has enough to do with a part of them."""
WIDE = {2: Shape(2, 2, 1, 4), 4: Shape(1, 4, 2, 4)}
"""How to cut where a warp multiplies more than eight token rows, by eights."""
WIDE_E4M3 = {2: Shape(2, 2, 1, 3), 4: Shape(1, 4, 1, 3)}
"""The same where a lane holds twice as much of a chunk."""


def source() -> str:
    """All of it."""
    return SHARED.read_text() + SOURCE.read_text()


@cache
def compiled(name: str, flags: tuple[str, ...]) -> Kernel:
    """The kernel for one shape, on the current device."""
    return Kernel.of(source(), name, flags)


def shape_of(format: Format, blocks: int, tiles: int, chunks: int, columns: int) -> Shape:
    """How to cut a product (measured on an H200, docs/kernel-notes.md).

    A few blocks are spread over all warps there are, else one or two warps stream all columns of a tile, and of several
    tiles where columns are few.
    """
    e4m3 = format.element is Element.E4M3
    if columns > 1:
        return (WIDE_E4M3 if e4m3 else WIDE)[columns]
    if blocks * tiles >= MANY_TILES:
        if chunks >= DEEP:
            return Shape(2, 2, 2, 2) if e4m3 else Shape(2, 2, 1, 4)
        if e4m3:
            return Shape(1, 4, 2, 4)
        return Shape(1, 4, 2 if chunks > 2 else 4, 2)
    across = next(count for count in (8, 4, 2, 1) if chunks >= 4 * count or count == 1)
    return Shape(across, max(1, 4 // across), 1, 3 if e4m3 else 4)


def run(layer: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
    """Tokens and routing in, tokens out."""
    tokens, problem = len(x_TD), layer.problem
    if not tokens:
        return
    top_k, slots = routed.ids_TK.shape[1], routed.ids_TK.numel()
    columns, listed = columns_for(tokens, slots, problem.local_experts), slots > FEW_SLOTS
    blocks, lists = slots, (routed.ids_TK, routed.ids_TK)
    if listed:
        blocks, lists = _list(problem, routed.ids_TK, columns, workspace)
    inner = workspace.take("decode inner", (slots, problem.inner), x_TD.dtype)
    y_SD = workspace.take("decode slots", (slots, problem.hidden), x_TD.dtype)
    shared = routed.ids_TK, *lists
    first, second = (
        constants(problem, columns, blocks, top_k, listed=listed, first=number == 0) for number in range(2)
    )
    _product(first, blocks, (x_TD, *shared), layer.gate_up, layer.gate_up_bias, routed, inner, early=listed)
    _product(second, blocks, (inner, *shared), layer.down, layer.down_bias, routed, y_SD, early=True)
    combine = compiled("combine", options(second))
    combine.launch((-(-problem.hidden // 256), tokens), 128, (y_SD, routed.ids_TK, out_TD), early=True)


def constants(
    problem: MoEProblem, columns: int, blocks: int, top_k: int, *, listed: bool, first: bool
) -> dict[str, Any]:
    """What the compiler is told.

    Args:
        problem: the layer.
        columns: eights of token rows in a block.
        blocks: how many; those of few slots, one for each, are not listed.
        top_k: slots of a token.
        listed: blocks are listed.
        first: of gate_up, else of down.
    """
    width, depth = (problem.inner, problem.hidden) if first else (problem.hidden, problem.inner)
    tiles, chunks = (problem.gate_up_rows if first else problem.hidden) // 16, depth // CHUNK
    cut = shape_of(problem.weights, min(blocks, problem.local_experts), tiles, chunks, columns)
    given = {"NT": columns, "SLOTS": 0 if listed else -(-blocks // 32) * 32, "K_CHUNKS": chunks, "TILES": tiles}
    given |= {"WK": cut.across, "WR": cut.down, "R": cut.tiles, "AHEAD": cut.ahead, "FIRST": first, "WIDTH": width}
    given |= {"TOP_K": top_k if first else 1, "SUMMED": top_k, "WEIGH": problem.router_weight_on_input == first}
    given |= {"FIRST_EXPERT": problem.first_expert, "LOCAL": problem.local_experts, "BIAS": problem.bias}
    return given | format_constants(problem.weights) | (activation_constants(problem) if first else {})


def _list(problem: MoEProblem, ids_TK: Tensor, columns: int, workspace: Workspace) -> tuple[int, tuple[Tensor, Tensor]]:
    slots, rows = ids_TK.numel(), 8 * columns
    number = min(slots, problem.local_experts + slots // rows)
    block_slots = workspace.take("decode block slots", (number, rows), torch.int32)
    experts = workspace.take("decode block experts", (number,), torch.int32)
    list_blocks(problem, ids_TK, block_slots, experts, workspace)
    return number, (block_slots, experts)


def _product(
    given: dict[str, Any],
    blocks: int,
    inputs: tuple[Tensor, ...],
    matrix: Fragments,
    bias: Tensor | None,
    routed: Routed,
    out: Tensor,
    *,
    early: bool,
) -> None:
    weights = routed.weights_TK
    tensors = matrix.units, matrix.tensor_scales, weights if bias is None else bias, weights, out
    rows, threads = -(-given["TILES"] // (given["WR"] * given["R"])), 32 * given["WK"] * given["WR"]
    compiled("expert_product", options(given)).launch((rows, blocks), threads, (*inputs, *tensors), early=early)


def columns_for(tokens: int, slots: int, experts: int) -> int:
    """Eights of token rows in a block: one expert's share of the slots, and no more than there are tokens."""
    wanted = min(tokens, 1.5 * slots / experts)
    return next(count for count in (1, 2, 4) if wanted <= 8 * count or count == 4)
