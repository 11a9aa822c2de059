"""The expert layers of vLLM 0.25.1 on one GPU: Marlin, its own Triton kernels, and the `triton_kernels` it brings."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from peer import Call, Peer, PeerLayer, interleaved, padded, tensor_scale
from torch import Tensor
from torch.nn.functional import pad

from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights


def session() -> AbstractContextManager[object]:
    """What the layers of vLLM look for around them: the configuration of an engine.

    Raises:
        ImportError: vLLM, or something that it needs, cannot be imported.
    """
    from vllm.config import VllmConfig, set_current_vllm_config

    return set_current_vllm_config(VllmConfig())


def activation_of(problem: MoEProblem) -> tuple[Any, dict[str, float]]:
    """What vLLM calls the activation over gate rows, then up rows, and what else it must be told."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    activation = problem.activation
    if activation.name == "silu":
        return MoEActivation.SILU, {}
    limits = {"clamp_limit": activation.limit, "alpha": activation.alpha, "beta": 1.0}
    return MoEActivation.SWIGLUOAI_UNINTERLEAVE, limits


class Marlin(Peer):
    """vLLM's default for 4-bit float experts on Hopper: weights decoded in registers, 16-bit activations."""

    def bind(self, problem: MoEProblem, counts: Sequence[int], weights: ExpertWeights) -> PeerLayer:
        from vllm.model_executor.layers.quantization.utils import marlin_utils, marlin_utils_fp4

        stub = SimpleNamespace(params_dtype=torch.bfloat16)
        workspace = marlin_utils.marlin_make_workspace_new(weights.gate_up.codes.device, 4)
        if problem.weights.name == "mxfp4":
            wide = padded(weights, 256, 128)
            gate_up, down, first, second, *biases = marlin_utils_fp4.prepare_moe_mxfp4_layer_for_marlin(
                stub,
                wide.gate_up.codes,
                wide.down.codes,
                wide.gate_up.scale.value,
                wide.down.scale.value,
                wide.gate_up_bias,
                wide.down_bias,
            )
            return _MarlinLayer(problem, gate_up, down, first, second, None, None, *biases, workspace)
        stub.num_experts, stub.hidden_size = problem.experts, problem.hidden
        stub.intermediate_size_per_partition = problem.inner
        gate_up, first, first_scale, down, second, second_scale = marlin_utils_fp4.prepare_nvfp4_moe_layer_for_marlin(
            stub,
            weights.gate_up.codes,
            weights.gate_up.scale.value,
            tensor_scale(weights.gate_up),
            weights.down.codes,
            weights.down.scale.value,
            tensor_scale(weights.down),
            True,
        )
        return _MarlinLayer(problem, gate_up, down, first, second, first_scale, second_scale, None, None, workspace)


@dataclass(frozen=True, eq=False)
class _MarlinLayer(PeerLayer):
    problem: MoEProblem
    gate_up: Tensor
    down: Tensor
    gate_up_scale: Tensor
    down_scale: Tensor
    gate_up_tensor_scale: Tensor | None
    down_tensor_scale: Tensor | None
    gate_up_bias: Tensor | None
    down_bias: Tensor | None
    workspace: Tensor

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        from vllm import _custom_ops
        from vllm.model_executor.layers.fused_moe.experts.marlin_moe import fused_marlin_moe
        from vllm.scalar_type import scalar_types

        ids, hidden = routed.ids_TK.int(), x_TD.shape[1]
        # vLLM widens the tokens in a kernel of its own; it is spared that here.
        wide = pad(x_TD, (0, self.gate_up.shape[1] * 16 - hidden))
        out = torch.full_like(wide, torch.nan)
        activation, limits = activation_of(self.problem)
        limits = {{"alpha": "gemm1_alpha", "beta": "gemm1_beta"}.get(key, key): it for key, it in limits.items()}

        def call() -> Tensor:
            fused_marlin_moe(
                wide,
                self.gate_up,
                self.down,
                self.gate_up_bias,
                self.down_bias,
                self.gate_up_scale,
                self.down_scale,
                routed.weights_TK,
                ids,
                scalar_types.float4_e2m1f.id,
                global_num_experts=self.problem.experts,
                activation=activation,
                moe_sum=_custom_ops.moe_sum,
                global_scale1=self.gate_up_tensor_scale,
                global_scale2=self.down_tensor_scale,
                workspace=self.workspace,
                output=out,
                **limits,
            )
            return out[:, :hidden]

        return call


class VllmTriton(Peer):
    """vLLM's default on Hopper for bf16 and, with activations rounded to e4m3 by groups, for FP8 blocks."""

    def bind(self, problem: MoEProblem, counts: Sequence[int], weights: ExpertWeights) -> PeerLayer:
        from vllm.model_executor.layers.fused_moe.config import fp8_w8a8_moe_quant_config

        if not problem.weights.quantised:
            return _TritonLayer(weights.gate_up.codes, weights.down.codes, None)
        scales = (weights.gate_up.scale.value, weights.down.scale.value)
        config = fp8_w8a8_moe_quant_config(*scales, block_shape=list(problem.weights.block))
        return _TritonLayer(weights.gate_up.codes, weights.down.codes, config)


@dataclass(frozen=True, eq=False)
class _TritonLayer(PeerLayer):
    gate_up: Tensor
    down: Tensor
    config: Any

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        from vllm.model_executor.layers.fused_moe import fused_experts

        weights, ids = routed.weights_TK, routed.ids_TK.int()
        return lambda: fused_experts(x_TD, self.gate_up, self.down, weights, ids, quant_config=self.config)


class TritonKernels(Peer):
    """vLLM's default for gpt-oss on Hopper: Triton's own `triton_kernels`, the activation inside the first product.

    It sorts rows from ids and weights, as it does beside any router; from the logits of gpt-oss's own it needs less.
    """

    def bind(self, problem: MoEProblem, counts: Sequence[int], weights: ExpertWeights) -> PeerLayer:
        from vllm.model_executor.layers.fused_moe.config import mxfp4_w4a16_moe_quant_config
        from vllm.model_executor.layers.quantization.utils.mxfp4_utils import _swizzle_mxfp4
        from vllm.utils.import_utils import import_triton_kernels

        import_triton_kernels()
        from triton_kernels.matmul_ogs import FlexCtx, PrecisionConfig

        gate_up, flex, scale = _swizzle_mxfp4(
            interleaved(weights.gate_up.codes), interleaved(weights.gate_up.scale.value)
        )
        first = PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
        down, flex, scale = _swizzle_mxfp4(weights.down.codes, weights.down.scale.value)
        second = PrecisionConfig(weight_scale=scale, flex_ctx=FlexCtx(rhs_data=flex))
        biases = (interleaved(weights.gate_up_bias), weights.down_bias) if problem.bias else (None, None)
        return _TritonKernelsLayer(problem, gate_up, down, mxfp4_w4a16_moe_quant_config(first, second, *biases))


@dataclass(frozen=True, eq=False)
class _TritonKernelsLayer(PeerLayer):
    problem: MoEProblem
    gate_up: Any
    down: Any
    config: Any

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        from vllm.model_executor.layers.fused_moe.experts.gpt_oss_triton_kernels_moe import (
            make_routing_data,
            triton_kernel_fused_experts,
        )

        ids, activation = routed.ids_TK.int(), self.problem.activation

        def call() -> Tensor:
            rows = make_routing_data(ids, routed.weights_TK, self.problem.experts)
            return triton_kernel_fused_experts(
                out_TD,
                x_TD,
                self.gate_up,
                self.down,
                *rows,
                topk=ids.shape[1],
                quant_config=self.config,
                swiglu_alpha=activation.alpha,
                swiglu_limit=activation.limit,
            )

        return call
