"""A decoder-only model: embed, layers, norm, head."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from muster.attention.interface import AttentionBatch, KVPages
from muster.checkpoint.spec import GroupedAttention, ModelSpec, RopeSpec
from muster.device import DTYPES, Device
from muster.model.attention import Step
from muster.model.layers import Embedding, Projection, RMSNorm, Rope
from muster.moe.layer import MoELayer
from muster.plan import Plan


class Attention(Protocol):
    """An attention block with its norms and projections."""

    def __call__(self, x_TD: Tensor, pages: KVPages, step: Step) -> Tensor:
        """`[T, D]` to `[T, D]`, newly allocated; writes this step's keys and values into `pages`."""
        ...


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Pre-norm attention, pre-norm feed-forward, each added to the residual stream."""

    attention_norm: RMSNorm
    attention: Attention
    feed_forward_norm: RMSNorm
    feed_forward: Projection

    def __call__(self, x_TD: Tensor, pages: KVPages, step: Step) -> None:
        """Adds the layer to `x_TD`."""
        x_TD += self.attention(self.attention_norm(x_TD), pages, step)
        x_TD += self.feed_forward(self.feed_forward_norm(x_TD))


class Decoder:
    """A model ready to run.

    Attributes:
        spec: what it is.
        device: where it is.
        plan: which backends run its parts.
        weight_bytes: bytes of all weights it keeps, in the layouts that its backends read.
        token_bytes: bytes of weights that one token reads: all but the experts and embeddings of others, as stored.
    """

    def __init__(
        self,
        spec: ModelSpec,
        device: Device,
        embed: Embedding,
        ropes: Mapping[RopeSpec, Rope],
        layers: Sequence[DecoderLayer],
        norm: RMSNorm,
        head: Projection,
        plan: Plan,
        weight_bytes: int,
        token_bytes: int,
    ) -> None:
        self.spec = spec
        self.device = device
        self.plan = plan
        self.weight_bytes = weight_bytes
        self.token_bytes = token_bytes
        self._embed = embed
        self._ropes = ropes
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head

    @property
    def expert_layers(self) -> Mapping[int, MoELayer]:
        """The layers whose feed-forward are experts, by number."""
        pairs = ((number, layer.feed_forward) for number, layer in enumerate(self._layers))
        return {number: experts for number, experts in pairs if isinstance(experts, MoELayer)}

    def new_cache(self, pages: int, page_size: int) -> tuple[KVPages, ...]:
        """An empty key-value cache of every layer, float32 on a CPU, else bf16."""

        def empty(attention: GroupedAttention) -> Tensor:
            shape = (pages, page_size, attention.kv_heads, attention.head_dim)
            if self.device.key == "cpu":
                # numpy leaves it to the system to give a zero page when it is first used; torch.zeros touches all.
                return torch.from_numpy(np.zeros(shape, dtype=np.float32))
            return torch.zeros(shape, dtype=DTYPES[self.device.activations], device=self.device.torch_device)

        attentions = [layer.attention for layer in self.spec.layers]
        return tuple(KVPages(empty(a), empty(a)) for a in attentions if isinstance(a, GroupedAttention))

    @torch.inference_mode()
    def forward(self, tokens_T: Tensor, batch: AttentionBatch, cache: Sequence[KVPages], rows_R: Tensor) -> Tensor:
        """One step of any mix of prefill, chunks and decodes.

        Args:
            tokens_T: int64 token ids, each in [0, V), sequence after sequence.
            batch: their positions and pages, in main memory; not changed while the step runs.
            cache: from `new_cache`; this step's keys and values are written into it.
            rows_R: int64, which of the T tokens need logits.

        Returns:
            Logits, float32 `[R, V]`.
        """
        device = self.device.torch_device
        batch = replace(batch, positions_T=batch.positions_T.to(device), slots_T=batch.slots_T.to(device))
        x_TD = self._embed(tokens_T.to(device))
        step = Step(batch, {spec: rope.at(batch.positions_T) for spec, rope in self._ropes.items()})
        for layer, pages in zip(self._layers, cache, strict=True):
            layer(x_TD, pages, step)
        return self._head(self._norm(x_TD[rows_R.to(device)])).float()
