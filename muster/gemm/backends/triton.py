"""`triton`: dense linears on GPUs, weights as they are stored and activations in bf16, nothing rounded but sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from muster.contract import Decline, Package
from muster.device import Device
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import LinearBackend, LinearFacts
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import register_linear
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.gemm.kernels.triton_layout import TritonLinearWeights

_COLUMNS = {"nvfp4": 32, "mxfp4": 64}
"""What K must be a multiple of where that is more than the products' own 16: two scale groups."""


@register_linear("triton")
class TritonLinear(LinearBackend["TritonLinearWeights"]):
    """One launch, for any number of tokens."""

    facts = LinearFacts(
        devices=frozenset({"8.0", "8.9", "9.0", "10.0", "12.0"}),
        weights=frozenset({"bf16", "nvfp4", "mxfp4", "fp8-block", "fp8-channel", "fp8-tensor"}),
        dtypes=frozenset({"bf16"}),
        bias=True,
        deterministic=True,
        columns_multiple=16,
        packages=(Package("triton", ">=3.6"),),
        kernels=("_linear",),
    )

    def supports(self, problem: LinearProblem, device: Device) -> Decline | None:
        facts = self.facts.decline(problem, device)
        reasons = dict.fromkeys(facts.reasons if facts else (), True)
        multiple = _COLUMNS.get(problem.weights.family, 1)
        found = f"needs columns % {multiple} == 0 for {problem.weights.name}, found {problem.columns}"
        return Decline.when(reasons | {found: problem.columns % multiple != 0})

    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> TritonLinearWeights:
        from muster.gemm.kernels.triton_layout import TritonLinearWeights

        return TritonLinearWeights.of(matrix, bias_N)

    def run(self, prepared: TritonLinearWeights, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
        from muster.gemm.kernels.triton_linear import linear

        linear(prepared, x_TK, out_TN, workspace)
