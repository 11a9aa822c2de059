"""The expert layers of Humming 0.1.10 with 16-bit activations, as vLLM 0.25.1 puts them together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from peer import Call, Peer, PeerLayer, tensor_scale
from peer_vllm import activation_of
from torch import Tensor

from muster.formats.matrix import QuantMatrix
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.moe.weights import ExpertWeights


class Humming(Peer):
    """Humming's indexed kernels with 16-bit activations, between vLLM's sorting and vLLM's sum."""

    def bind(self, problem: MoEProblem, counts: Sequence[int], weights: ExpertWeights) -> PeerLayer:
        slots = [tokens * problem.routing.top_k for tokens in counts]
        gate_up = _HummingMatrix.of(weights.gate_up, weights.gate_up_bias, slots)
        return _HummingLayer(problem, gate_up, _HummingMatrix.of(weights.down, weights.down_bias, slots))


_HUMMING_COMPUTE = json.dumps({"use_batch_invariant": False, "use_f16_accum": False, "gemm_type": "indexed"})


@dataclass(frozen=True, eq=False)
class _HummingMatrix:
    """One stack of matrices and the tile sizes that Humming's own rules choose by the number of slots."""

    module: torch.nn.Module
    rows: int
    sizes: Sequence[Any]

    @staticmethod
    def of(matrix: QuantMatrix, bias: Tensor | None, slots: Sequence[int]) -> _HummingMatrix:
        from humming import dtypes
        from humming.config import GemmType, WeightScaleType
        from humming.layer import HummingMethod
        from humming.schema import HummingInputSchema, HummingWeightSchema

        experts, rows, columns = matrix.shape
        nvfp4 = matrix.format.name == "nvfp4"
        element = torch.float8_e4m3fn if nvfp4 else torch.float8_e8m0fnu
        tensors = {"weight": matrix.codes.view(torch.int32), "weight_scale": matrix.scale.value.view(element)}
        if nvfp4:
            tensors["global_scale"] = tensor_scale(matrix)
        if bias is not None:
            tensors["bias"] = bias.bfloat16()
        module = torch.nn.Module()
        for name, tensor in tensors.items():
            setattr(module, name, torch.nn.Parameter(tensor, requires_grad=False))
        schema = HummingWeightSchema(
            b_dtype=dtypes.float4e2m1,
            bs_dtype=dtypes.float8e4m3 if nvfp4 else dtypes.float8e8m0,
            weight_scale_group_size=matrix.format.block[1],
            weight_scale_type=WeightScaleType.GROUP_TENSOR if nvfp4 else None,
        )
        HummingMethod.prepare_layer_meta(
            layer=module,
            shape_n=rows,
            shape_k=columns,
            weight_schema=schema,
            input_schema=HummingInputSchema(),
            num_experts=experts,
            pad_n_to_multiple=256,
            pad_k_to_multiple=128,
            has_bias=bias is not None,
            torch_dtype=torch.bfloat16,
        )
        HummingMethod.transform_humming_layer(module)
        module.register_buffer("locks", torch.zeros(1024, dtype=torch.int32, device=matrix.codes.device))
        sizes = HummingMethod.get_default_tuning_configs(layer=module, gemm_type=GemmType.INDEXED)
        return _HummingMatrix(module, rows, in_use(sizes, slots))

    def run(self, x: Tensor, out: Tensor, slots: int, top_k: int, blocks: dict[str, Tensor]) -> None:
        from humming.layer import HummingMethod

        HummingMethod.forward_layer(
            layer=self.module,
            inputs=x,
            outputs=out,
            top_k=top_k,
            valid_shape_m=slots,
            compute_config=_HUMMING_COMPUTE,
            tuning_config=json.dumps(self.sizes),
            **blocks,
        )


@dataclass(frozen=True, eq=False)
class _HummingLayer(PeerLayer):
    problem: MoEProblem
    gate_up: _HummingMatrix
    down: _HummingMatrix

    def call(self, x_TD: Tensor, routed: Routed, out_TD: Tensor) -> Call:
        from vllm.model_executor.layers.fused_moe.activation import apply_moe_activation
        from vllm.model_executor.layers.fused_moe.moe_align_block_size import moe_align_block_size
        from vllm.model_executor.layers.fused_moe.moe_fused_mul_sum import moe_fused_mul_sum

        ids, top_k = routed.ids_TK.int(), routed.ids_TK.shape[1]
        slots = ids.numel()
        (height,) = (size["block_shape"][0] for least, most, size in self.gate_up.sizes if least < slots <= most)
        activation, limits = activation_of(self.problem)

        def call() -> Tensor:
            names = ("sorted_ids", "expert_ids", "num_tokens_padded")
            aligned = moe_align_block_size(ids, height, self.problem.experts, ignore_invalid_experts=True)
            blocks = dict(zip(names, aligned, strict=True))
            product = x_TD.new_empty(slots, self.problem.gate_up_rows)
            inner, rows = x_TD.new_empty(slots, self.problem.inner), x_TD.new_empty(slots, self.problem.hidden)
            self.gate_up.run(x_TD, product, slots, top_k, blocks)
            apply_moe_activation(activation, inner, product, **limits)
            self.down.run(inner, rows, slots, 1, blocks)
            weights = routed.weights_TK
            moe_fused_mul_sum(
                inputs=rows.view(*ids.shape, -1), topk_weights=weights, topk_ids=ids, expert_map=None, outputs=out_TD
            )
            return out_TD

        return call


def in_use(sizes: Sequence[Any], slots: Sequence[int]) -> list[Any]:
    """Of tile sizes by ranges of slots those that are needed: every other would be compiled for nothing."""
    return [entry for entry in sizes if any(entry[0] < number <= entry[1] for number in slots)]
