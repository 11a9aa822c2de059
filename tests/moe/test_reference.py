"""The float64 reference against transformers' own MoE blocks, on tiny random weights."""

import pytest
import torch
from transformers import (
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    OlmoeConfig,
    Qwen3MoeConfig,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeMoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from muster.formats.matrix import QuantMatrix
from muster.lab.prove.tolerance import rms
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.reference import activate, expert_layer, gate_logits, moe_layer, shared_expert
from muster.moe.routing import route
from muster.moe.weights import ExpertWeights, Gate

HIDDEN, INNER, EXPERTS, TOKENS = 24, 20, 8, 19
WIDTHS = {"hidden_size": HIDDEN, "num_experts_per_tok": 3}
GROUPED = {"n_routed_experts": EXPERTS, "moe_intermediate_size": INNER, "n_group": 4, "topk_group": 2}
SIGMOID = {"scoring": "sigmoid", "selection_bias": True, "groups": 4, "groups_kept": 2, "epsilon": 1e-20}
BLOCKS = {
    "mixtral": (
        MixtralSparseMoeBlock,
        MixtralConfig(num_local_experts=EXPERTS, intermediate_size=INNER, **WIDTHS),
        RoutingRule(top_k=3),
    ),
    "olmoe": (
        OlmoeSparseMoeBlock,
        OlmoeConfig(num_experts=EXPERTS, intermediate_size=INNER, norm_topk_prob=False, **WIDTHS),
        RoutingRule(top_k=3, renormalise=False),
    ),
    "olmoe, renormalised": (
        OlmoeSparseMoeBlock,
        OlmoeConfig(num_experts=EXPERTS, intermediate_size=INNER, norm_topk_prob=True, **WIDTHS),
        RoutingRule(top_k=3),
    ),
    "qwen3_moe": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(num_experts=EXPERTS, moe_intermediate_size=INNER, norm_topk_prob=True, **WIDTHS),
        RoutingRule(top_k=3),
    ),
    "qwen3_moe, gelu, not renormalised": (
        Qwen3MoeSparseMoeBlock,
        Qwen3MoeConfig(
            num_experts=EXPERTS,
            moe_intermediate_size=INNER,
            norm_topk_prob=False,
            hidden_act="gelu_pytorch_tanh",
            **WIDTHS,
        ),
        RoutingRule(top_k=3, renormalise=False),
    ),
    "deepseek_v3": (
        DeepseekV3MoE,
        DeepseekV3Config(norm_topk_prob=True, routed_scaling_factor=2.5, n_shared_experts=1, **GROUPED, **WIDTHS),
        RoutingRule(top_k=3, scaling_factor=2.5, **SIGMOID),
    ),
    "glm4_moe": (
        Glm4MoeMoE,
        Glm4MoeConfig(norm_topk_prob=True, routed_scaling_factor=1.5, n_shared_experts=2, **GROUPED, **WIDTHS),
        RoutingRule(top_k=3, scaling_factor=1.5, **SIGMOID),
    ),
    "gpt_oss": (
        GptOssMLP,
        GptOssConfig(num_local_experts=EXPERTS, intermediate_size=INNER, **WIDTHS),
        RoutingRule(top_k=3, softmax_after_top_k=True),
    ),
}


def build(name: str, dtype: torch.dtype) -> torch.nn.Module:
    """The block with random weights large enough that a clamp at 7 is reached and routing is decided."""
    block, config, _ = BLOCKS[name]
    config._experts_implementation = "eager"
    module = block(config).to(dtype).eval()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64) * 0.7)
    return module


def problem_of(name: str, module: torch.nn.Module) -> tuple[MoEProblem, Gate, ExpertWeights]:
    rule = BLOCKS[name][2]
    router = module.router if name == "gpt_oss" else module.gate
    experts = module.experts
    if name == "gpt_oss":
        gate_up = torch.cat([experts.gate_up_proj[..., 0::2], experts.gate_up_proj[..., 1::2]], -1).mT
        bias = torch.cat([experts.gate_up_proj_bias[:, 0::2], experts.gate_up_proj_bias[:, 1::2]], -1)
        weights = ExpertWeights(plain(gate_up), plain(experts.down_proj.mT), bias.detach(), experts.down_proj_bias)
        activation = Activation("swiglu-oai", limit=7.0)
    else:
        weights = ExpertWeights(plain(experts.gate_up_proj), plain(experts.down_proj))
        activation = Activation("gelu" if "gelu" in name else "silu")
    problem = MoEProblem(
        HIDDEN, INNER, EXPERTS, rule, EXPERTS, dtype="f32", activation=activation, bias=name == "gpt_oss"
    )
    gate = Gate(router.weight.detach(), getattr(router, "bias", None), getattr(router, "e_score_correction_bias", None))
    return problem, gate, weights


def plain(tensor: torch.Tensor) -> QuantMatrix:
    """float32 weights that the float64 block holds too, exactly."""
    return QuantMatrix.plain(tensor.detach().float())


@pytest.mark.parametrize("name", BLOCKS)
@torch.no_grad()
def test_layer_equals_transformers_block(name):
    """transformers routes in float32 and here computes experts in float32: the float64 layer is as near as that."""
    module = build(name, torch.float32)
    problem, gate, weights = problem_of(name, module)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8))
    theirs = module(x_TD[None])
    theirs = (theirs[0] if name == "gpt_oss" else theirs).squeeze(0)
    ours = moe_layer(problem, gate, weights, x_TD)
    if hasattr(module, "shared_experts"):
        shared = module.shared_experts
        gate_up = torch.cat([shared.gate_proj.weight, shared.up_proj.weight])
        ours += shared_expert(problem.activation, plain(gate_up), plain(shared.down_proj.weight), x_TD)
    assert ours.dtype is torch.float64
    assert max(rms(theirs, ours)) < 1e-6


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
@torch.no_grad()
def test_experts_equal_transformers_experts_in_float64(name):
    module = build(name, torch.float32)
    problem, gate, weights = problem_of(name, module)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    routed = route(gate_logits(gate, x_TD), problem.routing)
    theirs = module.double().experts(x_TD, routed.ids_TK, routed.weights_TK.double())
    assert max(rms(theirs, expert_layer(problem, weights, x_TD, routed))) < 1e-14


def test_limit_is_reached_by_the_gpt_oss_test_weights():
    module = build("gpt_oss", torch.float32)
    _, _, weights = problem_of("gpt_oss", module)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(8))
    assert (x_TD @ weights.gate_up.codes[0].T).abs().max() > 7.0


def test_shared_expert_gate_is_a_sigmoid_per_token():
    generator = torch.Generator().manual_seed(1)
    gate_up, down = torch.randn(2 * INNER, HIDDEN, generator=generator), torch.randn(HIDDEN, INNER, generator=generator)
    x_TD, gate_D = torch.randn(5, HIDDEN, generator=generator), torch.randn(HIDDEN, generator=generator)
    args = (Activation(), QuantMatrix.plain(gate_up), QuantMatrix.plain(down), x_TD)
    x = x_TD.double()
    expected = shared_expert(*args) / (1 + torch.exp(-(x * gate_D).sum(-1, keepdim=True)))
    assert max(rms(shared_expert(*args, gate_D=gate_D), expected)) < 1e-15


@pytest.mark.parametrize(
    ("activation", "expected"),
    [
        (Activation("silu"), [3 / (1 + 2.718281828459045**-3) * -9]),
        (Activation("silu", limit=2.0), [2 / (1 + 2.718281828459045**-2) * -2]),
        (Activation("swiglu-oai", limit=7.0, alpha=1.0), [3 / (1 + 2.718281828459045**-3) * (-7 + 1)]),
        (Activation("swiglu-oai", alpha=1.0), [3 / (1 + 2.718281828459045**-3) * (-9 + 1)]),
        (Activation("relu2"), [9.0, 0.0]),
    ],
)
def test_activation_by_hand(activation, expected):
    gate_up = torch.tensor([3.0, -9.0], dtype=torch.float64)
    assert activate(activation, gate_up).tolist() == pytest.approx(expected)


def test_local_range_computes_only_its_own_experts_and_ranges_add_up():
    generator = torch.Generator().manual_seed(2)
    gate_up = torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)
    down = torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)
    x_TD = torch.randn(TOKENS, HIDDEN, generator=generator)
    routed = route(torch.randn(TOKENS, EXPERTS, generator=generator), RoutingRule(top_k=3))
    whole = MoEProblem(HIDDEN, INNER, EXPERTS, RoutingRule(top_k=3), EXPERTS, dtype="f32")
    parts = torch.zeros(TOKENS, HIDDEN, dtype=torch.float64)
    for first, count in ((0, 3), (3, 4), (7, 1)):
        part = MoEProblem(HIDDEN, INNER, EXPERTS, RoutingRule(top_k=3), count, first_expert=first, dtype="f32")
        mine = slice(first, first + count)
        weights = ExpertWeights(QuantMatrix.plain(gate_up[mine]), QuantMatrix.plain(down[mine]))
        parts += expert_layer(part, weights, x_TD, routed)
    weights = ExpertWeights(QuantMatrix.plain(gate_up), QuantMatrix.plain(down))
    assert max(rms(parts, expert_layer(whole, weights, x_TD, routed))) < 1e-14


def test_sentinel_slots_are_skipped_even_when_their_weight_is_nan():
    generator = torch.Generator().manual_seed(3)
    weights = ExpertWeights(
        QuantMatrix.plain(torch.randn(EXPERTS, 2 * INNER, HIDDEN, generator=generator)),
        QuantMatrix.plain(torch.randn(EXPERTS, HIDDEN, INNER, generator=generator)),
    )
    problem = MoEProblem(HIDDEN, INNER, EXPERTS, RoutingRule(top_k=2), EXPERTS, dtype="f32")
    x_TD = torch.randn(3, HIDDEN, generator=generator)
    nan = float("nan")
    ids_TK = torch.tensor([[1, -1], [EXPERTS, 1], [-1, -7]])
    routed = Routed(ids_TK, torch.tensor([[0.5, nan], [nan, 0.5], [nan, nan]]))
    alone = Routed(torch.tensor([[1], [1], [1]]), torch.tensor([[0.5], [0.5], [0.0]]))
    assert torch.equal(expert_layer(problem, weights, x_TD, routed), expert_layer(problem, weights, x_TD, alone))
