"""The floor of a part: the least time the hardware allows, from the bytes and operations that cannot be saved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from muster.gemm.problem import LinearProblem
from muster.lab.measure.peaks import Peaks
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem

_DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}
_ROUTING_BYTES = 8 + 4
"""Of one slot: an int64 id and a float32 weight."""
_BIAS_BYTES = 2
"""Published checkpoints store biases as bf16; a floor counts the least."""
_ORDER_BYTES = 4


@dataclass(frozen=True)
class Floor:
    """What one call cannot do without, and how long that takes here at least.

    Attributes:
        weight_bytes: of the distinct experts that have tokens (or the matrix), scales and biases included.
        activation_bytes: inputs with their routing, and outputs; once each.
        operations: multiplications and additions of the products.
        bandwidth: bytes per second this device was measured to read.
        rate: operations per second it was measured to do; None where that is not known.
    """

    weight_bytes: int
    activation_bytes: int
    operations: int
    bandwidth: float
    rate: float | None = None

    @property
    def bytes_read(self) -> int:
        """All bytes that must move."""
        return self.weight_bytes + self.activation_bytes

    @property
    def seconds(self) -> float:
        """The longer of the bytes at the read bandwidth and the operations at the rate."""
        return max(self.bytes_read / self.bandwidth, self.operations / self.rate if self.rate else 0.0)

    def under(self, peaks: Peaks, problem: MoEProblem | LinearProblem) -> Floor:
        """The same work at other peaks."""
        rate = peaks.rate(problem.weights, problem.dtype)
        return replace(self, bandwidth=peaks.read_bandwidth, rate=rate)

    def share(self, seconds: float) -> float:
        """Which part of a measured time the hardware itself needs: 1 is as fast as can be."""
        return self.seconds / seconds


def floor(problem: MoEProblem | LinearProblem, tokens: int, routed: Routed | None, peaks: Peaks) -> Floor:
    """The floor of `tokens` tokens; an expert layer needs the very routing that is timed."""
    rate = peaks.rate(problem.weights, problem.dtype)
    if isinstance(problem, LinearProblem):
        weights = _linear_bytes(problem)
        activations = tokens * (problem.rows + problem.columns) * _DTYPE_BYTES[problem.dtype]
        operations = 2 * tokens * problem.rows * problem.columns
        return Floor(weights, activations, operations, peaks.read_bandwidth, rate)

    assert routed is not None, "the bytes of an expert layer depend on the routing"
    slots, experts, inputs = _used(problem, routed)
    weights = experts * _expert_bytes(problem)
    activations = (inputs + tokens) * problem.hidden * _DTYPE_BYTES[problem.dtype]
    activations += tokens * problem.routing.top_k * _ROUTING_BYTES
    operations = 2 * slots * (problem.gate_up_rows + problem.inner) * problem.hidden
    return Floor(weights, activations, operations, peaks.read_bandwidth, rate)


def _used(problem: MoEProblem, routed: Routed) -> tuple[int, int, int]:
    """Slots that fall to local experts, how many distinct experts those are, and tokens that have such a slot."""
    local = routed.ids_TK - problem.first_expert
    here = (local >= 0) & (local < problem.local_experts)
    return int(here.sum()), len(torch.unique(local[here])), int(here.any(dim=-1).sum())


def _expert_bytes(problem: MoEProblem) -> int:
    """Stored bytes of one expert."""
    pieces = 2 if problem.activation.gated else 1
    total = problem.weights.bytes(problem.gate_up_rows, problem.hidden, pieces)
    total += problem.weights.bytes(problem.hidden, problem.inner)
    if problem.bias:
        total += _BIAS_BYTES * (problem.gate_up_rows + problem.hidden)
    if problem.act_order:
        total += _ORDER_BYTES * (problem.hidden + problem.inner)
    return total


def _linear_bytes(problem: LinearProblem) -> int:
    total = problem.weights.bytes(problem.rows, problem.columns)
    if problem.bias:
        total += _BIAS_BYTES * problem.rows
    if problem.act_order:
        total += _ORDER_BYTES * problem.columns
    return total
