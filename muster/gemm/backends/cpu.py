"""`cpu`: few tokens, weights decoded in registers as they stream from memory, both sides float32."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from muster.contract import Decline
from muster.device import Device
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import LinearBackend, LinearFacts
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import register_linear
from muster.native import REQUIREMENT, rows, team
from muster.native.jit import F32, I64, Emitter, Kernel, Target, Value, host
from muster.workspace import Workspace

MAX_TOKENS = 128
"""From here on decoding to float32 once and torch's product win (measured on two Zen 4 cores)."""
_WIDTHS = (4, 2, 1)
"""Tokens that share one decode of a row, most first."""
_ROWS = 16
"""Rows for which the tokens take turns: their weights stay in the first cache, and a token's results fill a line."""


@dataclass(frozen=True, eq=False)
class CpuPrepared:
    """The kernel of this shape and format, and where it finds the weights."""

    kernel: Kernel
    packed: bool
    data: rows.RowData
    bias_N: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes made beyond the matrix."""
        return self.data.nbytes


@register_linear("cpu")
class CpuLinear(LinearBackend[CpuPrepared]):
    """Reads each weight once for several tokens; every token's sum has the same order whatever its company."""

    facts = LinearFacts(
        devices=frozenset({"cpu"}),
        weights=rows.FAMILIES,
        dtypes=frozenset({"f32"}),
        bias=True,
        deterministic=True,
        batch_invariant=True,
        columns_multiple=rows.BLOCK,
        max_tokens=MAX_TOKENS,
        packages=(REQUIREMENT,),
        kernels=("linear",),
    )

    def supports(self, problem: LinearProblem, device: Device) -> Decline | None:
        facts = self.facts.decline(problem, device)
        reasons = dict.fromkeys(facts.reasons if facts else (), True)
        why_not = rows.why_not(problem.weights)
        return Decline.when(reasons | ({why_not: True} if why_not else {}))

    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> CpuPrepared:
        data = rows.RowData.of(matrix)
        layout = rows.Rows.of(matrix, data)
        kernel = linear_kernel(layout.any_height, bias_N is not None, host())
        return CpuPrepared(kernel, layout.packed, data, bias_N)

    def run(self, prepared: CpuPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
        scratch = 0
        if prepared.packed:
            size = (torch.get_num_threads(), x_TK.numel())
            scratch = workspace.take("vectors", size, torch.float32).data_ptr()
        bias = 0 if prepared.bias_N is None else prepared.bias_N.data_ptr()
        addresses = (x_TK.data_ptr(), out_TN.data_ptr(), scratch, bias)
        counts = (x_TK.shape[0], out_TN.shape[1])
        team.team().run(prepared.kernel, (*counts, *addresses, *prepared.data.addresses))


@cache
def linear_kernel(layout: rows.Rows, bias: bool, target: Target) -> Kernel:
    """Arguments: T, N, the addresses of x, out, scratch `[threads, T, K]` and bias, then those of the rows."""
    e = Emitter("linear", target)
    thread, threads = team.member(e)
    tokens, count, x, out, scratch, bias_N = (e.argument(team.RESERVED + slot) for slot in range(6))
    operands = rows.Operands.of(e, team.RESERVED + 6)
    stride = 4 * layout.columns

    if layout.packed:
        mine = scratch + thread * tokens * stride
        with e.loop(0, tokens) as token:
            rows.reorder(e, x + token * stride, mine + token * stride, layout.columns)
        x = mine

    def multiply(start: Value, stop: Value, token: Value, width: int) -> None:
        vectors = [x + (token + i) * stride for i in range(width)]
        with e.loop(start, stop) as n:
            total = layout.total(operands, n)
            for i, dot in enumerate(layout.dots(layout.row(operands, n), vectors)):
                y = dot if total is None else dot * total
                y = y + e.load(F32, bias_N + n * 4) if bias else y
                e.store(y, out + ((token + i) * count + n) * 4)

    last = (thread + 1) * count // threads
    with e.loop(thread * count // threads, last, _ROWS) as start:
        stop = e.minimum(start + _ROWS, last)
        e.strips(e.constant(I64, 0), tokens, _WIDTHS, partial(multiply, start, stop))
    return e.compile()
