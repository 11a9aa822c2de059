"""What an expert layer must compute: shapes, formats, routing rule, activation, ranks. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from muster.formats.spec import BF16, Format

Scoring = Literal["softmax", "sigmoid", "sqrt-softplus"]
ActivationName = Literal["silu", "gelu", "relu2", "swiglu-oai"]


@dataclass(frozen=True)
class RoutingRule:
    """How router logits become expert ids and weights.

    Attributes:
        top_k: K, experts per token.
        scoring: softmax over all experts, sigmoid per expert, or sqrt(softplus) per expert.
        softmax_after_top_k: take the top K logits first, then softmax over those K (gpt-oss).
        selection_bias: a float32 bias per expert is added to the scores for the choice only, never to the weights.
        groups: experts stand in this many equal groups; 1 means no grouping.
        groups_kept: groups that survive, by the sum of their two best scores.
        renormalise: divide the K weights by their sum (plus `epsilon`).
        scaling_factor: multiplies the final weights, exactly once.
        epsilon: added to the sum when renormalising (1e-20 for the sigmoid families, 0 for softmax).
    """

    top_k: int
    scoring: Scoring = "softmax"
    softmax_after_top_k: bool = False
    selection_bias: bool = False
    groups: int = 1
    groups_kept: int = 1
    renormalise: bool = True
    scaling_factor: float = 1.0
    epsilon: float = 0.0


@dataclass(frozen=True)
class Activation:
    """The function between the two GEMMs.

    `silu` and `gelu` (tanh form) are gated: act(gate) * up. `relu2` is not gated: relu(x)^2.
    `swiglu-oai` (gpt-oss): gate * sigmoid(alpha * gate) * (up + 1).
    A limit first clamps what any gated one takes: gate = min(gate, limit), up = clamp(up, -limit, limit).
    """

    name: ActivationName = "silu"
    limit: float | None = None
    alpha: float = 1.702

    @property
    def gated(self) -> bool:
        """Whether the first GEMM has gate and up rows (2F) or only F."""
        return self.name != "relu2"


@dataclass(frozen=True)
class MoEProblem:
    """One expert layer on one rank.

    Attributes:
        hidden: D.
        inner: F, per expert and on this rank.
        experts: E, over all ranks.
        routing: the rule (holds K).
        local_experts: L, experts whose weights lie on this rank.
        first_expert: global id of the first local expert; ids outside [first, first + L) belong to other ranks.
        weights: stored format of the expert matrices.
        act_order: int4 columns belong to scale groups in any order (GPTQ), as `QuantMatrix.order` has it.
        dtype: activations in and out: "bf16", "f16" or "f32".
        activation: the function between the GEMMs.
        bias: gate_up and down carry biases.
        router_weight_on_input: the routing weight multiplies the expert's input rather than its output.
    """

    hidden: int
    inner: int
    experts: int
    routing: RoutingRule
    local_experts: int
    first_expert: int = 0
    weights: Format = BF16
    act_order: bool = False
    dtype: Literal["bf16", "f16", "f32"] = "bf16"
    activation: Activation = field(default_factory=Activation)
    bias: bool = False
    router_weight_on_input: bool = False

    @property
    def gate_up_rows(self) -> int:
        """Output rows of the first GEMM: 2F when gated, else F."""
        return self.inner * (2 if self.activation.gated else 1)
