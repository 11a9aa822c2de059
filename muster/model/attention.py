"""The grouped-query attention block: project, norm, rotate, attend over the pages, project back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from muster.attention.interface import AttentionBatch, KVPages, PagedAttention
from muster.checkpoint.spec import GroupedAttention, RopeSpec
from muster.model.layers import Projection, RMSNorm, Rope, Rotation


@dataclass(frozen=True, eq=False)
class Step:
    """What every layer of one forward pass shares: the batch, and the rotation of its tokens for each kind of rope."""

    batch: AttentionBatch
    rotations: Mapping[RopeSpec, Rotation]


class QKNorm(Protocol):
    """A norm of queries and keys before they are rotated."""

    def __call__(self, qk_TX: Tensor) -> Tensor:
        """Normed `[T, (N + M) * H]`, queries first."""
        ...


class HeadNorm:
    """Each head of queries and keys is normed over its own H entries, in one go (Qwen3)."""

    def __init__(self, query_H: Tensor, key_H: Tensor, spec: GroupedAttention, eps: float) -> None:
        gains = torch.cat((query_H.expand(spec.heads, -1), key_H.expand(spec.kv_heads, -1)))
        self._norm = RMSNorm(gains, eps)
        self._shape = gains.shape

    def __call__(self, qk_TX: Tensor) -> Tensor:
        """`[T, (N + M) * H]` to the same shape."""
        return self._norm(qk_TX.view(-1, *self._shape)).flatten(-2)


class WidthNorm:
    """All query heads are normed as one vector, and so are all key heads (OLMoE)."""

    def __init__(self, query_X: Tensor, key_Y: Tensor, eps: float) -> None:
        self._query = RMSNorm(query_X, eps)
        self._key = RMSNorm(key_Y, eps)
        self._queries = len(query_X)

    def __call__(self, qk_TX: Tensor) -> Tensor:
        """`[T, (N + M) * H]` to the same shape."""
        return torch.cat((self._query(qk_TX[:, : self._queries]), self._key(qk_TX[:, self._queries :])), -1)


class GroupedQueryAttention:
    """`[T, D]` to `[T, D]`, writing its keys and values into the pages.

    Args:
        spec: heads, rope, clamp.
        qkv: fused projection to `[T, (N + 2M) * H]`.
        out: projection from `[T, N * H]`.
        rope: the rotary embedding that `spec.rope` describes.
        core: the paged attention itself; layers alike share one.
        qk_norm: a norm of queries and keys, or None.
    """

    def __init__(
        self,
        spec: GroupedAttention,
        qkv: Projection,
        out: Projection,
        rope: Rope,
        core: PagedAttention,
        qk_norm: QKNorm | None = None,
    ) -> None:
        self._spec = spec
        self._qkv = qkv
        self._out = out
        self._rope = rope
        self._core = core
        self._qk_norm = qk_norm

    def __call__(self, x_TD: Tensor, pages: KVPages, step: Step) -> Tensor:
        """The block's output, without the residual."""
        spec = self._spec
        both = spec.heads + spec.kv_heads
        qkv_TX = self._qkv(x_TD)
        qk_TX, value_TX = qkv_TX[:, : both * spec.head_dim], qkv_TX[:, both * spec.head_dim :]
        if self._qk_norm is not None:
            qk_TX = self._qk_norm(qk_TX)
        if spec.clip_qkv is not None:
            qk_TX = qk_TX.clamp(-spec.clip_qkv, spec.clip_qkv)
            value_TX = value_TX.clamp(-spec.clip_qkv, spec.clip_qkv)
        qk_TNH = self._rope.turn(qk_TX.view(-1, both, spec.head_dim), step.rotations[spec.rope])
        qk_TNH = qk_TNH.to(pages.key_PSMH.dtype)
        query_TNH, key_TMH = qk_TNH[:, : spec.heads], qk_TNH[:, spec.heads :]
        value_TMH = value_TX.reshape(-1, spec.kv_heads, spec.head_dim).to(pages.value_PSMH.dtype)
        attended_TNH = self._core.run(query_TNH, key_TMH, value_TMH, pages, step.batch)
        return self._out(attended_TNH.flatten(1))
