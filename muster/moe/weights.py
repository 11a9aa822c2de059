"""The weights of one expert layer as the loader hands them to a backend's `prepare`."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from muster.formats.matrix import QuantMatrix


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """Local experts, stacked.

    Attributes:
        gate_up: `[L, 2F, D]`, gate rows first, then up rows (two row pieces, each with its own tensor scale);
            `[L, F, D]` for activations without a gate.
        down: `[L, D, F]`.
        gate_up_bias: `[L, 2F]` or None.
        down_bias: `[L, D]` or None.
    """

    gate_up: QuantMatrix
    down: QuantMatrix
    gate_up_bias: Tensor | None = None
    down_bias: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all of it, scales included."""
        biases = (bias for bias in (self.gate_up_bias, self.down_bias) if bias is not None)
        return self.gate_up.nbytes + self.down.nbytes + sum(bias.nbytes for bias in biases)


@dataclass(frozen=True, eq=False)
class Gate:
    """The router's own weights.

    Attributes:
        weight_ED: `[E, D]`, any float dtype.
        bias_E: added to the logits (gpt-oss), or None.
        selection_bias_E: float32, added to the scores for the choice only, or None.
    """

    weight_ED: Tensor
    bias_E: Tensor | None = None
    selection_bias_E: Tensor | None = None
