"""An expert layer on Triton's grouped products: what is launched, and with what."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from muster.moe.backend import ExpertRows, Routed
from muster.moe.kernels import triton_experts as kernels
from muster.moe.kernels.triton_blocks import Blocks, group, row_blocks
from muster.moe.kernels.triton_blocks import list_blocks as list_blocks
from muster.moe.kernels.triton_matrix import Matrix
from muster.moe.kernels.triton_tiles import E4M3_TOKENS, TOKENS, Tile, Tiles
from muster.moe.kernels.tuning import Cuts, cuts
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

FORMATS = {"bf16": 0, "fp8-tensor": 1, "fp8-channel": 1, "fp8-block": 2, "nvfp4": 3, "mxfp4": 4, "int4": 5}
"""The kernels' numbers of the families of formats."""
_SPAN = 128
"""Columns of tokens in e4m3 that share a scale."""
_SPANS = 8
"""As many of them as one program quantises."""


@dataclass(frozen=True, eq=False)
class TritonLayer:
    """The weights of a layer and how its kernels are launched.

    Attributes:
        cuts: the sizes that they are launched with.
        e4m3: tokens are quantised to e4m3 as they come, rather than read in bf16.
    """

    problem: MoEProblem
    gate_up: Matrix
    down: Matrix
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    cuts: Cuts
    e4m3: bool = False

    @staticmethod
    def of(problem: MoEProblem, weights: ExpertWeights, *, e4m3: bool = False) -> TritonLayer:
        """Makes the layout."""
        gate_up_bias, down_bias = (
            None if bias is None else bias.float().contiguous() for bias in (weights.gate_up_bias, weights.down_bias)
        )
        matrices = Matrix.of(weights.gate_up), Matrix.of(weights.down)
        sizes = cuts(problem, E4M3_TOKENS if e4m3 else TOKENS)
        return TritonLayer(problem, *matrices, gate_up_bias, down_bias, sizes, e4m3)

    @property
    def nbytes(self) -> int:
        """Bytes beyond the stored weights."""
        return self.gate_up.own + self.down.own

    def run(self, x_TD: Tensor, routed: Routed, out_TD: Tensor, workspace: Workspace) -> None:
        """Tokens and routing in, tokens out."""
        tokens, problem = len(x_TD), self.problem
        if not tokens:
            return
        top_k, slots = routed.ids_TK.shape[1], routed.ids_TK.numel()
        sizes = self.cuts.tiles(slots)
        blocks = group(problem, routed.ids_TK, sizes.rows, workspace)
        weights = routed.weights_TK
        y_SD = workspace.take("triton slots", (slots, problem.hidden), x_TD.dtype)
        self._products(x_TD, top_k, slots, blocks, weights, y_SD, sizes, workspace)
        width = min(1024, 1 << (problem.hidden - 1).bit_length())
        kernels.combine_kernel[(tokens, -(-problem.hidden // width))](
            y_SD,
            routed.ids_TK,
            out_TD,
            problem.first_expert,
            problem.local_experts,
            TOP_K=top_k,
            D=problem.hidden,
            BLOCK_N=width,
            ASM=not interpreted(),
            num_warps=4,
        )

    def run_rows(self, rows: ExpertRows, row_block: int, out_RD: Tensor, workspace: Workspace) -> None:
        """Rows in, rows out; blocks of padded rows."""
        total = len(rows.x_RD)
        if not total:
            return
        sizes = self.cuts.of_rows(row_block)
        blocks = row_blocks(rows, row_block)
        self._products(rows.x_RD, 1, total, blocks, None, out_RD, sizes, workspace)

    def _products(
        self,
        x: Tensor,
        top_k: int,
        slots: int,
        blocks: Blocks,
        weights: Tensor | None,
        y: Tensor,
        sizes: Tiles,
        workspace: Workspace,
    ) -> None:
        problem, number = self.problem, len(blocks.experts)
        inner = workspace.take("triton inner", (slots, problem.inner), x.dtype)
        on_input = weights is not None and problem.router_weight_on_input
        on_output = weights is not None and not problem.router_weight_on_input
        given = x if weights is None else weights
        tokens, scales = self._quantised(x, workspace) if self.e4m3 else (x, x)
        kernels.gate_up_kernel[(number * -(-problem.inner // sizes.first.columns),)](
            tokens,
            scales,
            blocks.slots,
            blocks.experts,
            given,
            *_pointers(self.gate_up, self.gate_up_bias),
            inner,
            number,
            problem.activation.limit or 0.0,
            problem.activation.alpha,
            TOP_K=top_k,
            ACTIVATION=problem.activation.name,
            LIMITED=problem.activation.limit is not None,
            WEIGH=on_input,
            A8=self.e4m3,
            **self._constants(self.gate_up, sizes, sizes.first),
        )
        kernels.down_kernel[(number * -(-problem.hidden // sizes.second.columns),)](
            inner,
            blocks.slots,
            blocks.experts,
            given,
            *_pointers(self.down, self.down_bias),
            y,
            number,
            WEIGH=on_output,
            **self._constants(self.down, sizes, sizes.second),
        )

    def _constants(self, matrix: Matrix, sizes: Tiles, tile: Tile) -> dict[str, Any]:
        """What both products are compiled for."""
        problem = self.problem
        return {
            "D": problem.hidden,
            "F": problem.inner,
            "W_BYTES": matrix.codes[0].numel(),
            "S_COUNT": matrix.scales[0].numel(),
            "R_COUNT": matrix.pieces,
            "FORMAT": FORMATS[problem.weights.family],
            "GROUP": matrix.group,
            "ZEROS": matrix.zeroed,
            "BIAS": problem.bias,
            "BLOCK_M": sizes.rows,
            "BLOCK_N": tile.columns,
            "HALF": matrix.half or tile.half,
            "GROUP_M": sizes.group,
            "ASM": not interpreted(),
            "num_warps": tile.warps,
            "num_stages": tile.stages,
        }

    def _quantised(self, x_TD: Tensor, workspace: Workspace) -> tuple[Tensor, Tensor]:
        """e4m3 codes, uint8 `[T, D]`, and their scales, float32 `[T, D/128]`."""
        count, columns = x_TD.shape
        spans = -(-columns // _SPAN)
        codes = workspace.take("triton codes", (count, columns), torch.uint8)
        scales = workspace.take("triton scales of codes", (count, spans), torch.float32)
        kernels.quantise_kernel[(count, -(-spans // _SPANS))](
            x_TD, codes, scales, K=columns, SPANS=_SPANS, ASM=not interpreted(), num_warps=4
        )
        return codes, scales


def interpreted() -> bool:
    """Whether Triton's interpreter runs the kernels: it has no inline assembly."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _pointers(matrix: Matrix, bias: Tensor | None) -> tuple[Tensor, ...]:
    given = matrix.codes if bias is None else bias
    return matrix.codes, matrix.scales, matrix.zeros, matrix.row_scales, given
