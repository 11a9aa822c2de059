"""What the functions that read weights as fragments share: `decode`, `wgmma` and its kin."""

from __future__ import annotations

from typing import TYPE_CHECKING

from muster.contract import Decline
from muster.device import Device
from muster.moe.backend import FusedFunc
from muster.moe.backends.triton import also
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights

if TYPE_CHECKING:
    from muster.moe.kernels.fragments import FragmentLayer


class FragmentFunc(FusedFunc["FragmentLayer"]):
    """A fused function over fragments.

    Attributes:
        e4m3: its first product is of tokens in e4m3, and 4-bit weights lie as that wants them.
    """

    e4m3: bool = False

    def supports(self, problem: MoEProblem, device: Device) -> Decline | None:
        return also(super().supports(problem, device), _whole_blocks(problem))

    def prepare(self, problem: MoEProblem, weights: ExpertWeights) -> FragmentLayer:
        from muster.moe.kernels.fragments import FragmentLayer

        return FragmentLayer.of(problem, weights, e4m3=self.e4m3)


def _whole_blocks(problem: MoEProblem) -> dict[str, bool]:
    """What the fragments ask beyond the facts: no unit of weights is in two blocks that share a scale."""
    widths = (("hidden", problem.hidden), ("inner", problem.inner))
    return {
        f"needs {name} % 128 == 0 for fp8-block, found {found}": problem.weights.name == "fp8-block"
        and found % 128 != 0
        for name, found in widths
    }
