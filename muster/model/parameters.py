"""From a checkpoint to running parts: each is read, counted and prepared for the device."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from muster.attention import cpu_paged
from muster.attention.interface import AttentionProblem, PagedAttention
from muster.attention.torch_paged import TorchPagedAttention
from muster.checkpoint.loader import Loader
from muster.checkpoint.names import Names
from muster.checkpoint.spec import DenseSpec, GroupedAttention, ModelSpec, MoESpec, RopeSpec
from muster.device import Device
from muster.errors import CheckpointError, FormatError
from muster.formats.matrix import QuantMatrix, concat_rows
from muster.gemm.linear import Linear, linear_problem
from muster.model.attention import GroupedQueryAttention, QKNorm
from muster.model.layers import Embedding, GatedMLP, Projection, RMSNorm, Rope, SideBySide
from muster.model.problem import moe_problem
from muster.moe.layer import Gate, MoELayer
from muster.moe.weights import ExpertWeights
from muster.plan import Choice, Choose, Plan, Role
from muster.workspace import Workspace


class Parameters:
    """Makes the parts of a model from what the loader reads.

    Once the loader has met a wrong tensor nothing more is prepared; the rest is only read, so that its `finish`
    names everything that is wrong.

    Attributes:
        spec: the model.
        names: its module paths.
        nbytes: bytes of the parts made so far, in the layouts that their backends read.
        idle_bytes: those of them that one token does not read: experts it does not choose, other tokens' embeddings.
    """

    def __init__(self, loader: Loader, device: Device, choose: Choose) -> None:
        self.spec: ModelSpec = loader.spec
        self.names: Names = loader.names
        self.nbytes = 0
        self.idle_bytes = 0
        self._loader = loader
        self._device = device
        self._choose = choose
        self._workspace = Workspace(device.torch_device)
        self._choices: dict[tuple[Role, Hashable], Choice] = {}
        self._ropes: dict[RopeSpec, Rope] = {}
        self._cores: dict[AttentionProblem, PagedAttention] = {}
        self._table_VD: Tensor | None = None

    @property
    def plan(self) -> Plan:
        """What runs the parts made so far."""
        return Plan(MappingProxyType(self._choices))

    @property
    def ropes(self) -> Mapping[RopeSpec, Rope]:
        """The rotary embeddings of the layers made so far."""
        return self._ropes

    def embedding(self) -> Embedding:
        """The token embedding; where it is tied, its bytes are counted with the head."""
        self._table_VD = table_VD = self._put(self._loader.embedding())
        if not self.spec.tied_embeddings:
            self.nbytes += table_VD.nbytes
            self.idle_bytes += table_VD.nbytes - table_VD[0].nbytes
        return Embedding(table_VD)

    def head(self) -> Projection:
        """The output projection."""
        matrix = self._loader.head()
        if self.spec.tied_embeddings and self._table_VD is not None and not matrix.format.quantised:
            matrix = QuantMatrix.plain(self._table_VD)
        return self._linear(self._put_matrix(matrix), None)

    def norm(self, module: str) -> RMSNorm:
        """An RMS norm over D."""
        weight_D = self.vector(f"{module}.weight", self.spec.hidden)
        return RMSNorm(weight_D, self.spec.norm_eps, zero_centred=self.spec.norm_zero_centred)

    def vector(self, name: str, size: int) -> Tensor:
        """A tensor of one axis: a norm's weight, a bias."""
        vector = self._put(self._loader.tensor(name, (size,)))
        self.nbytes += vector.nbytes
        return vector

    def projection(self, rows: Mapping[str, int], columns: int, *, bias: bool = False) -> Projection:
        """Modules over the same `columns`, one below the other, with the rows that each has.

        They are one matrix where their formats allow it, so that a step reads them in one product.
        """
        stored = [self._loader.matrix(module, (count, columns)) for module, count in rows.items()]
        matrices = [self._put_matrix(matrix) for matrix in stored]
        biases = [self.vector(f"{module}.bias", count) if bias else None for module, count in rows.items()]
        try:
            matrix = concat_rows(matrices) if len(matrices) > 1 else matrices[0]
        except FormatError:
            return SideBySide(tuple(self._linear(*pair) for pair in zip(matrices, biases, strict=True)))
        return self._linear(matrix, torch.cat([one for one in biases if one is not None]) if bias else None)

    def grouped_attention(
        self, layer: str, spec: GroupedAttention, qk_norm: QKNorm | None = None
    ) -> GroupedQueryAttention:
        """The grouped-query attention block of a layer."""
        block = f"{layer}.self_attn"
        queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        qkv = {f"{block}.q_proj": queries, f"{block}.k_proj": keys, f"{block}.v_proj": keys}
        problem = AttentionProblem(spec.heads, spec.kv_heads, spec.head_dim, spec.scale, spec.window)
        return GroupedQueryAttention(
            spec,
            self.projection(qkv, self.spec.hidden, bias=spec.qkv_bias),
            self.projection({f"{block}.o_proj": self.spec.hidden}, queries, bias=spec.output_bias),
            self._ropes.setdefault(spec.rope, Rope(spec.rope, self._device.torch_device)),
            self._core(problem),
            qk_norm,
        )

    def _core(self, problem: AttentionProblem) -> PagedAttention:
        """The paged attention that layers of one problem share."""
        if problem not in self._cores:
            on_cpu = self._device.key == "cpu" and cpu_paged.reads(problem)
            self._cores[problem] = cpu_paged.CpuPagedAttention(problem) if on_cpu else TorchPagedAttention(problem)
        return self._cores[problem]

    def feed_forward(self, index: int) -> Projection:
        """The experts of a layer, or its dense feed-forward."""
        spec = self.spec.layers[index].feed_forward
        return self._dense(index, spec) if isinstance(spec, DenseSpec) else self._experts(index, spec)

    def _dense(self, index: int, spec: DenseSpec) -> GatedMLP:
        block = f"{self.names.layer(index)}.mlp"
        gate_up = self.projection({f"{block}.gate_proj": spec.inner, f"{block}.up_proj": spec.inner}, self.spec.hidden)
        down = self.projection({f"{block}.down_proj": self.spec.hidden}, spec.inner)
        return GatedMLP(gate_up, down, spec.activation)

    def _experts(self, index: int, spec: MoESpec) -> Projection:
        router, tensors = self._loader.router(index, spec), self._loader.experts(index, spec)
        if not self._loader.sound:
            return _unbuilt
        if tensors.gate_up.format != tensors.down.format:
            raise CheckpointError(
                f"experts of layer {index}",
                found=f"gate and up in {tensors.gate_up.format.name}, down in {tensors.down.format.name}",
                expected="one format for all of a layer's experts",
            )
        act_order = any(matrix.order is not None for matrix in (tensors.gate_up, tensors.down))
        problem = moe_problem(spec, self.spec.hidden, tensors.gate_up.format, self._device, act_order)
        experts = ExpertWeights(
            self._put_matrix(tensors.gate_up),
            self._put_matrix(tensors.down),
            None if tensors.gate_up_bias is None else self._put(tensors.gate_up_bias),
            None if tensors.down_bias is None else self._put(tensors.down_bias),
        )
        layer = MoELayer(
            problem,
            Gate(router.weight, router.bias, router.selection_bias),
            experts,
            self._choice(Role.EXPERTS, problem),
            self._device,
            workspace=self._workspace,
        )
        self.nbytes += layer.nbytes
        self.idle_bytes += experts.nbytes - experts.nbytes * spec.routing.top_k // spec.experts
        return layer

    def _linear(self, matrix: QuantMatrix, bias: Tensor | None) -> Projection:
        if not self._loader.sound:
            return _unbuilt
        problem = linear_problem(matrix, bias, self._device)
        linear = Linear(problem, matrix, bias, self._choice(Role.LINEARS, problem))
        self.nbytes += linear.nbytes
        return linear

    def _put(self, tensor: Tensor) -> Tensor:
        """The tensor on the model's device; on a CPU as it is, mapped from the file."""
        return tensor.to(self._device.torch_device)

    def _put_matrix(self, matrix: QuantMatrix) -> QuantMatrix:
        return matrix.with_tensors({name: self._put(one) for name, one in matrix.tensors.items()}, matrix.shape)

    def _choice(self, role: Role, problem: Hashable) -> Choice:
        if (role, problem) not in self._choices:
            self._choices[role, problem] = self._choose(role, problem)
        return self._choices[role, problem]


def _unbuilt(_: Tensor) -> Tensor:
    """Stands for a part whose tensors are wrong; the loader raises before anyone calls it."""
    raise AssertionError("a part of a checkpoint that did not load was called")
