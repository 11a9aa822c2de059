"""What a comparison asks of another engine, and our weights in the forms that other engines take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import pad

from muster.contract import Decline
from muster.formats.matrix import QuantMatrix, Scale
from muster.formats.rounding import Rounding
from muster.formats.spec import Element
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights

Call = Callable[[], Tensor]
"""Computes the layer, and returns where the result is."""


class PeerLayer(ABC):
    """One layer's weights as a peer's kernels read them."""

    @abstractmethod
    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        """The layer on these tokens; whatever the peer's own router gives in another form is made before the call."""


@dataclass(frozen=True)
class Peer(ABC):
    """A way in which another engine computes expert layers.

    Attributes:
        name: what records call it.
        package: what must be importable.
        weights: format families that it reads.
        activations: that it computes.
        bias: it takes biases.
        rounding: where it rounds, read in its source.
    """

    name: str
    package: str
    weights: frozenset[str]
    activations: frozenset[str]
    bias: bool
    rounding: Rounding

    def declines(self, problem: MoEProblem) -> Decline | None:
        """None, or every reason against; imports nothing."""
        return Decline.when(
            {
                f"{self.package} cannot be imported": find_spec(self.package) is None,
                f"computes {', '.join(sorted(self.activations))}": problem.activation.name not in self.activations,
                "takes no biases": problem.bias and not self.bias,
            }
        )

    @abstractmethod
    def bind(self, problem: MoEProblem, counts: Sequence[int], weights: ExpertWeights) -> PeerLayer:
        """The layout, and whatever must be compiled for these token counts."""


def tensor_scale(matrix: QuantMatrix) -> Tensor:
    """The tensor scale of each expert, float32 `[E]`, for layouts with one for all its rows.

    Raises:
        ValueError: the row pieces of an expert differ.
    """
    scales = matrix.global_scale.value
    if not torch.equal(scales, scales[:, :1].expand_as(scales)):
        raise ValueError("gate and up have different tensor scales, the layout has one for both")
    return scales[:, 0].float().contiguous()


def padded(weights: ExpertWeights, hidden_multiple: int, inner_multiple: int) -> ExpertWeights:
    """An MXFP4 layer with D and F at multiples; all that is added is nought, gate and up rows each at their end."""
    hidden, inner = weights.down.shape[1:]
    wider, longer = -hidden % hidden_multiple, -inner % inner_multiple
    gate_up_bias, down_bias = weights.gate_up_bias, weights.down_bias
    if gate_up_bias is not None:
        gate_up_bias = pad(gate_up_bias.unflatten(-1, (2, -1)), (0, longer)).flatten(-2)
    if down_bias is not None:
        down_bias = pad(down_bias, (0, wider))
    gate_up, down = _padded(weights.gate_up, 2, longer, wider), _padded(weights.down, 1, wider, longer)
    return ExpertWeights(gate_up, down, gate_up_bias, down_bias)


def _padded(matrix: QuantMatrix, pieces: int, rows: int, columns: int) -> QuantMatrix:
    experts, height, width = matrix.shape
    scales = matrix.scale.value.unflatten(1, (pieces, -1))
    scales = pad(scales, (0, columns // 32, 0, rows), value=_ONE).flatten(1, 2)
    codes = pad(matrix.codes.unflatten(1, (pieces, -1)), (0, columns // 2, 0, rows)).flatten(1, 2)
    shape = (experts, height + pieces * rows, width + columns)
    return QuantMatrix(matrix.format, shape, codes, Scale(scales, Element.E8M0))


_ONE = 127
"""In e8m0."""


def interleaved(rows: Tensor) -> Tensor:
    """`[E, 2F, ...]` of gate rows and up rows as gate 0, up 0, gate 1, ..."""
    return rows.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2).contiguous()
