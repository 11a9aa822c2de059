"""An expert layer of 4-bit or FP8 weights for many tokens on Hopper: blocks of slots, their kernels, the launches."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster.formats.spec import Element, Format
from muster.moe.backend import Routed
from muster.moe.kernels import triton_experts
from muster.moe.kernels.fragments import CHUNK, FragmentLayer, activation_constants, format_constants
from muster.moe.kernels.nvrtc import Kernel, options
from muster.moe.kernels.triton_blocks import Blocks, list_blocks
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace

SHARED, SOURCE, ARRANGE, QUANTISE = (
    Path(__file__).with_name(name) for name in ("fragments.cu", "wgmma.cu", "arrange.cu", "quantise.cu")
)
TARGET = "90a"
"""`wgmma` exists for this architecture alone (PTX ISA, "wgmma.mma_async")."""


@dataclass(frozen=True)
class Shape:
    """How a program computes a block.

    Attributes:
        sizes: to which a block's own count of token rows is rounded up; the last is the most a block has.
        groups: warpgroups that multiply.
        tiles: of 64 weight rows per warpgroup.
        stages: of the pipeline through shared memory.
        depth: chunks of 64 columns of a stage.
        resident: programs on a multiprocessor.
    """

    sizes: tuple[int, ...]
    groups: int
    tiles: int
    stages: int
    depth: int
    resident: int

    @property
    def most(self) -> int:
        """Token rows of a block."""
        return self.sizes[-1]

    @property
    def threads(self) -> int:
        """Of a program; beside the warpgroups that multiply one warp copies, or, for many rows, a warpgroup."""
        return self.groups * 128 + (128 if self.most >= 128 and self.groups == 2 else 32)

    @property
    def all_tiles(self) -> int:
        """Tiles of 64 weight rows of a program."""
        return self.groups * self.tiles

    def shared(self, unit: int, *, first: bool, e4m3: bool = False) -> int:
        """Bytes of shared memory for units of so many bytes: stages, and results on their way to memory.

        A stage holds rows of 64 columns in bf16 or, with `e4m3`, of 128 columns and their scales.
        """
        results = min(self.most, 64) * (self.tiles * (64 if first else 128) + 16)
        rows = self.most * (2 * CHUNK + 4) if e4m3 else self.depth * self.most * 2 * CHUNK
        return self.stages * (rows + self.depth * self.all_tiles * unit) + self.groups * results


Pair = tuple[Shape, Shape]
"""Of gate_up and of down, for blocks of as many rows."""


def alike(shape: Shape) -> Pair:
    """The shape for both products."""
    return shape, shape


SHAPES = (
    alike(Shape((16,), 2, 2, 4, 2, 2)),
    alike(Shape((32,), 2, 1, 3, 2, 3)),
    alike(Shape((48, 64), 4, 1, 5, 2, 1)),
    alike(Shape((80, 128), 2, 2, 3, 2, 1)),
    alike(Shape((144, 192, 256), 2, 1, 5, 1, 1)),
)
"""Of 4-bit codes, from small to large; none spills (tests/moe/test_wgmma_compiles.py)."""
E4M3_SHAPES = (
    alike(Shape((16,), 2, 1, 3, 2, 3)),
    (Shape((32,), 4, 1, 4, 2, 1), Shape((32,), 2, 1, 2, 2, 3)),
    alike(Shape((48, 64), 4, 1, 3, 2, 1)),
    (Shape((64, 72, 80, 96, 128), 2, 1, 4, 2, 1), Shape((80, 128), 2, 2, 5, 1, 1)),
    alike(Shape((144, 192, 256), 2, 1, 4, 1, 1)),
)
"""Of FP8, whose units are twice as large."""
TOKENS_SHAPES = (
    Shape((16,), 2, 1, 3, 2, 2),
    Shape((32,), 2, 1, 4, 2, 1),
    Shape((64,), 3, 1, 4, 2, 1),
    Shape((128,), 2, 1, 4, 2, 1),
)
"""Of gate_up with tokens in e4m3."""
TOGETHER = 8
"""Blocks that share a tile of weights while it is in the second cache, where experts have several blocks."""


class _Sizes(ctypes.Structure):
    """`Sizes` of the kernel."""

    _fields_ = tuple(
        (name, ctypes.c_int) for name in ("chunks", "tiles", "width", "blocks", "together", "rows", "items")
    )


@cache
def shapes_for(format: Format, *, e4m3: bool = False) -> tuple[Pair, ...]:
    """From small to large; with `e4m3` for tokens in e4m3."""
    pairs = E4M3_SHAPES if format.element is Element.E4M3 else SHAPES
    if not e4m3:
        return pairs
    return tuple((first, second) for first in TOKENS_SHAPES for _, second in pairs if second.most == first.most)


def shape_for(format: Format, slots: int, experts: int, *, e4m3: bool = False) -> Pair:
    """By the rows of an average expert and a third as many again."""
    shapes = shapes_for(format, e4m3=e4m3)
    return next((pair for pair in shapes if 1.35 * slots / experts <= pair[0].most), shapes[-1])


def source(shape: Shape, *, e4m3: bool = False) -> str:
    """The kernel's source with the products it uses, of e4m3 or of bf16."""
    products = (_multiply(size, e4m3=e4m3) for size in shape.sizes)
    sizes = f"#define SIZES {', '.join(map(str, shape.sizes))}\n"
    return "\n".join((sizes, SHARED.read_text(), _DECLARATION, *products, SOURCE.read_text()))


ROWS = 64 | 1 << 30
"""Upper half of a description of shared memory: eight rows to the next are 64 * 16 bytes away, 128-byte swizzle (PTX
ISA, "Matrix descriptor format")."""

_DECLARATION = (
    "template <int N>\n__device__ void multiply(float (&c)[MOST / 2], const unsigned (&a)[4], unsigned b, bool add);\n"
)


def _multiply(columns: int, *, e4m3: bool) -> str:
    """`multiply<columns>`: one `wgmma` of 64 weight rows, which wants every register by name."""
    count = columns // 2
    sums, operand = (", ".join(f"%{first + i}" for i in range(size)) for first, size in ((0, count), (count, 4)))
    kind, flags = ("k32.f32.e4m3.e4m3", "p, 1, 1") if e4m3 else ("k16.f32.bf16.bf16", "p, 1, 1, 0")
    return f"""template <> __device__ __forceinline__
void multiply<{columns}>(float (&c)[MOST / 2], const unsigned (&a)[4], unsigned b, bool add) {{
    asm volatile("{{.reg .pred p; .reg .b64 rows;"
        "setp.ne.b32 p, %{count + 5}, 0; mov.b64 rows, {{%{count + 4}, {ROWS}}};"
        "wgmma.mma_async.sync.aligned.m64n{columns}{kind} "
        "{{{sums}}}, {{{operand}}}, rows, {flags};}}"
        : {", ".join(f'"+f"(c[{i}])' for i in range(count))}
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"((int)add));
}}
"""


@cache
def product(shape: Shape, flags: tuple[str, ...], shared: int, e4m3: bool) -> Kernel:
    """The kernel of one product, on the current device."""
    return Kernel.of(source(shape, e4m3=e4m3), "expert_product", flags, shared=shared, target=TARGET)


@cache
def arrange(e4m3: bool) -> Kernel:
    """The kernel that puts together the rows of a block, and bf16 columns into the order of the fragments."""
    return Kernel.of(ARRANGE.read_text(), "arrange", options({"A8": e4m3}))


@cache
def quantise() -> Kernel:
    """The kernel that makes e4m3 of tokens, columns in the order of the fragments."""
    return Kernel.of(QUANTISE.read_text(), "quantise", options({}))


@cache
def _multiprocessors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def constants(problem: MoEProblem, shape: Shape, *, first: bool, e4m3: bool = False) -> dict[str, Any]:
    """What the compiler is told; with `e4m3` tokens are in e4m3."""
    given: dict[str, Any] = {"MOST": shape.most, "GROUPS": shape.groups, "MT": shape.tiles}
    given |= {
        "STAGES": shape.stages,
        "DEPTH": shape.depth,
        "RESIDENT": shape.resident,
        "FIRST": first,
        "BIAS": problem.bias,
    }
    given["WEIGH"] = problem.router_weight_on_input == first
    given |= format_constants(problem.weights, e4m3=e4m3)
    return given | activation_constants(problem) if first else given


def run(
    layer: FragmentLayer, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace, *, e4m3: bool
) -> None:
    """Tokens and routing in, tokens out; with `e4m3` tokens are quantised for the first product."""
    tokens, problem = len(x_TD), layer.problem
    if not tokens:
        return
    top_k, slots = routed.ids_TK.shape[1], routed.ids_TK.numel()
    first, second = shape_for(problem.weights, slots, problem.local_experts, e4m3=e4m3)
    blocks = _list(problem, routed.ids_TK, first.most, workspace)
    rows = blocks.experts.numel() * first.most
    inner = workspace.take("wgmma inner", (rows, problem.inner), x_TD.dtype)
    y_SD = workspace.take("wgmma slots", (slots, problem.hidden), x_TD.dtype)
    taken = workspace.take("wgmma items taken", (2,), torch.int32)
    x, scales = _rows(e4m3, x_TD, top_k, blocks, taken, workspace)
    weights = routed.weights_TK
    _product(layer, first, (x, scales), blocks, weights, inner, taken[:1], first=True, e4m3=e4m3)
    _product(layer, second, (inner, inner), blocks, weights, y_SD, taken[1:], first=False, e4m3=False)
    width = min(1024, 1 << (problem.hidden - 1).bit_length())
    triton_experts.combine_kernel[(tokens, -(-problem.hidden // width))](
        y_SD,
        routed.ids_TK,
        out_TD,
        problem.first_expert,
        problem.local_experts,
        TOP_K=top_k,
        D=problem.hidden,
        BLOCK_N=width,
        ASM=True,
        num_warps=4,
    )


def _rows(
    e4m3: bool, x_TD: Tensor, top_k: int, blocks: Blocks, taken: Tensor, workspace: Workspace
) -> tuple[Tensor, Tensor]:
    """The token rows of each block, `[columns / 64 or 128, rows, 128 bytes]`, and their scales, or the rows again."""
    (tokens, hidden), (number, most) = x_TD.shape, blocks.slots.shape
    wide, kind = (2 * CHUNK, torch.uint8) if e4m3 else (CHUNK, x_TD.dtype)
    groups, rows = hidden // wide, number * most
    x = workspace.take("wgmma rows", (rows, hidden), kind)
    given, scales, row_scales = x_TD, x, x
    if e4m3:
        given = workspace.take("wgmma tokens", (tokens, hidden), torch.uint8)
        scales = workspace.take("wgmma scales of tokens", (tokens, groups), torch.float32)
        row_scales = workspace.take("wgmma scales of rows", (groups, rows), torch.float32)
        quantise().launch((-(-tokens * groups // 8), 1), 256, (x_TD, given, scales, ctypes.c_int(tokens * groups)))
    counts = (ctypes.c_int(value) for value in (most, top_k, groups, rows))
    tensors = given, scales, blocks.slots, blocks.experts, x, row_scales, taken
    arrange(e4m3).launch((-(-groups // 8), number), 256, (*tensors, *counts))
    return x, row_scales


def _list(problem: MoEProblem, ids_TK: Tensor, rows: int, workspace: Workspace) -> Blocks:
    slots = ids_TK.numel()
    number = min(slots, problem.local_experts + slots // rows)
    blocks = Blocks(
        workspace.take("wgmma block slots", (number, rows), torch.int32),
        workspace.take("wgmma block experts", (number,), torch.int32),
    )
    list_blocks(problem, ids_TK, blocks.slots, blocks.experts, workspace)
    return blocks


def _product(
    layer: FragmentLayer,
    shape: Shape,
    x: tuple[Tensor, Tensor],
    blocks: Blocks,
    weights: Tensor,
    out: Tensor,
    taken: Tensor,
    *,
    first: bool,
    e4m3: bool,
) -> None:
    matrix, bias = (layer.gate_up, layer.gate_up_bias) if first else (layer.down, layer.down_bias)
    number, problem = blocks.experts.numel(), layer.problem
    items = number * -(-matrix.tiles // shape.all_tiles)
    width = problem.inner if first else problem.hidden
    together = TOGETHER if number > problem.local_experts else 1
    sizes = _Sizes(matrix.chunks, matrix.tiles, width, number, together, number * shape.most, items)
    given = constants(problem, shape, first=first, e4m3=e4m3)
    kernel = product(shape, options(given), shape.shared(given["UNIT"], first=first, e4m3=e4m3), e4m3)
    tensors = matrix.units, matrix.tensor_scales, weights if bias is None else bias, weights, out, taken
    programs = min(items, shape.resident * _multiprocessors())
    kernel.launch((programs, 1), shape.threads, (*x, blocks.slots, blocks.experts, *tensors, sizes), early=True)
