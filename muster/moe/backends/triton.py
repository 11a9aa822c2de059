"""`triton`: a runner core on GPUs; both products over padded rows, low-bit weights decoded in registers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from muster.contract import Decline, Package
from muster.device import Device
from muster.formats.rounding import Grid, Rounding
from muster.moe.backend import ExpertRows, Facts, RowLayout, RunnerCore
from muster.moe.kernels.triton_tiles import TOKENS
from muster.moe.problem import MoEProblem
from muster.moe.registry import register_runner_core
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

if TYPE_CHECKING:
    from muster.moe.kernels.triton_layer import TritonLayer

KERNELS = ("gate_up_kernel", "down_kernel")
ROW_BLOCK = 64


def facts(kernels: tuple[str, ...], *, weighted: bool) -> Facts:
    """What the kernels can do, whoever groups the rows.

    Args:
        kernels: what is launched.
        weighted: weighted rows pass through bf16 before they are summed.
    """
    return Facts(
        devices=frozenset({"8.0", "8.9", "9.0", "10.0", "12.0"}),
        weights=frozenset({"bf16", "nvfp4", "mxfp4", "int4", "fp8-tensor", "fp8-channel", "fp8-block"}),
        dtypes=frozenset({"bf16"}),
        activations=frozenset({"silu", "gelu", "relu2", "swiglu-oai"}),
        bias=True,
        clamp=True,
        router_weight_on_input=True,
        zero_tokens=True,
        sentinel_ids=True,
        graph_safe=True,
        layout="triton",
        deterministic=True,
        hidden_multiple=32,
        inner_multiple=32,
        packages=(Package("triton", ">=3.6"),),
        kernels=kernels,
        tiles=TOKENS,
        rounding=Rounding(inner=Grid.BF16, weighted=Grid.BF16 if weighted else Grid.NONE),
    )


def also(answer: Decline | None, checks: dict[str, bool]) -> Decline | None:
    """A decline with further reasons."""
    return Decline.when(dict.fromkeys(answer.reasons if answer else (), True) | checks)


def pairs_decline(problem: MoEProblem) -> dict[str, bool]:
    """What the kernels ask of 4-bit codes beyond the facts: half a step of columns is whole groups, or within one."""
    widths = (("hidden", problem.hidden), ("inner", problem.inner))
    group = problem.weights.block[1] if problem.weights.block else 0
    return {
        f"needs {name} % 64 == 0 for mxfp4, found {found}": problem.weights.name == "mxfp4" and found % 64 != 0
        for name, found in widths
    } | {
        f"needs int4 groups of a multiple of 16 columns, found {group}": (
            problem.weights.family == "int4" and group % 16 != 0
        )
    }


@register_runner_core("triton")
class TritonCore(RunnerCore["TritonLayer"]):
    """Two launches."""

    facts = facts(KERNELS, weighted=False)
    layouts = frozenset({RowLayout.PADDED})
    row_block = ROW_BLOCK

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        return also(super().supports(problem, device), pairs_decline(problem))

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> TritonLayer:
        from muster.moe.kernels.triton_layer import TritonLayer

        return TritonLayer.of(problem, weights)

    def run(self, prepared: TritonLayer, rows: ExpertRows, out_RD: Tensor, workspace: Workspace) -> None:
        prepared.run_rows(rows, self.row_block, out_RD, workspace)
