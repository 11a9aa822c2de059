"""What a sequence keeps between steps: keys and values, latents, indexer keys, recurrent states; and what a step
reads of it and computes on it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Literal

from muster.checkpoint.names import Names
from muster.checkpoint.shapes import draft_layer
from muster.checkpoint.spec import AttentionSpec, GatedDelta, GroupedAttention, IndexerSpec, LatentAttention, ModelSpec

CacheFormat = Literal["bf16", "fp8"]

_SCALED = 128
"""Values that share one float32 scale in the FP8 layouts of latents and indexer keys (FlashMLA, DeepGEMM)."""

_STATE_BYTES: Mapping[str, int] = MappingProxyType({"f32": 4, "bf16": 2, "f16": 2})


class Memory(StrEnum):
    """The kinds of memory a layer can have of its sequence."""

    KEYS = "keys and values"
    WINDOW = "keys and values in a window"
    LATENT = "latents"
    INDEXER = "indexer keys"
    STATE = "recurrent states"


@dataclass(frozen=True)
class Kept:
    """One kind of memory in one layer.

    Attributes:
        memory: what it is.
        token: bytes per token, 0 for a state.
        fixed: bytes per sequence, whatever its length.
        window: tokens that are kept at most; None: all.
        chosen: tokens that a step reads at most, by an indexer's choice; None: all that are kept.
        score: operations per query token and per token attended; for a state, operations per token.
        expanded: the same where every token attended is new and its keys can be expanded once; None: as `score`.
        heads: heads that ranks can share it by; 1: every rank keeps all of it.
    """

    memory: Memory
    token: int = 0
    fixed: int = 0
    window: int | None = None
    chosen: int | None = None
    score: int = 0
    expanded: int | None = None
    heads: int = 1

    def held(self, context: int) -> int:
        """Bytes that a sequence of `context` tokens keeps."""
        return self.fixed + self.token * (context if self.window is None else min(context, self.window))

    def read(self, past: int, tokens: int) -> int:
        """Bytes that a step of `tokens` new tokens after `past` ones must read and write at least."""
        if self.fixed:
            return 2 * self.fixed
        seen = past + tokens
        if self.window is not None:
            seen = min(seen, self.window + tokens - 1)
        if self.chosen is not None:
            seen = min(seen, self.chosen * tokens)
        return self.token * seen

    def operations(self, past: int, tokens: int) -> int:
        """Multiplications and additions of that step, causal."""
        if self.fixed:
            return self.score * tokens
        most = min(limit for limit in (self.window, self.chosen, past + tokens) if limit is not None)
        below = min(tokens, max(0, most - past))  # queries that still see all tokens before them
        whole = below * past + below * (below + 1) // 2
        score = self.expanded if past == 0 and self.expanded is not None else self.score
        return score * (whole + (tokens - below) * most)

    def share(self, ranks: int) -> float:
        """The part of it that one of `ranks` tensor-parallel ranks keeps."""
        return 1 / min(ranks, self.heads)


@dataclass(frozen=True)
class SequenceMemory:
    """All that one sequence keeps, over the layers of a model."""

    layers: tuple[Kept, ...]

    @classmethod
    def of(cls, spec: ModelSpec, format: CacheFormat = "bf16") -> SequenceMemory:
        """That of the decoder."""
        return cls(tuple(kept for layer in spec.layers for kept in _kept(layer.attention, format)))

    @classmethod
    def of_draft(cls, spec: ModelSpec, format: CacheFormat = "bf16") -> SequenceMemory:
        """That of one draft layer."""
        return cls(tuple(_kept(draft_layer(Names(spec)).attention, format)))

    def token_bytes(self, ranks: int = 1) -> float:
        """Bytes that each further token adds on one rank, windows left out."""
        return sum(kept.token * kept.share(ranks) for kept in self.layers if kept.window is None)

    def held(self, context: int, ranks: int = 1) -> float:
        """Bytes of a sequence of `context` tokens on one rank."""
        return sum(kept.held(context) * kept.share(ranks) for kept in self.layers)

    def fixed(self, ranks: int = 1) -> float:
        """Bytes per sequence on one rank that do not grow with it, full windows included."""
        return sum((kept.fixed + kept.token * (kept.window or 0)) * kept.share(ranks) for kept in self.layers)

    def by_memory(self) -> Mapping[Memory, tuple[Kept, ...]]:
        """The layers that keep each kind."""
        kinds = dict.fromkeys(kept.memory for kept in self.layers)
        return {kind: tuple(kept for kept in self.layers if kept.memory is kind) for kind in kinds}


def _kept(attention: AttentionSpec, format: CacheFormat) -> tuple[Kept, ...]:
    if isinstance(attention, GatedDelta):
        return (_delta(attention),)
    if isinstance(attention, LatentAttention):
        indexer = attention.indexer
        latents = (_latent(attention, format),)
        return latents if indexer is None or indexer.shared else (*latents, _indexer(indexer))
    return (_grouped(attention, format),)


def _grouped(attention: GroupedAttention, format: CacheFormat) -> Kept:
    elements = 2 * attention.kv_heads * attention.head_dim
    return Kept(
        memory=Memory.KEYS if attention.window is None else Memory.WINDOW,
        token=elements * (1 if format == "fp8" else 2),
        window=attention.window,
        score=4 * attention.heads * attention.head_dim,
        heads=attention.kv_heads,
    )


def _latent(attention: LatentAttention, format: CacheFormat) -> Kept:
    rotated = 2 * attention.rope_dim
    width = attention.kv_lora
    scaled = width + 4 * (width // _SCALED)
    return Kept(
        memory=Memory.LATENT,
        token=rotated + (scaled if format == "fp8" else 2 * width),
        chosen=attention.indexer.top_k if attention.indexer is not None else None,
        score=2 * attention.heads * (2 * width + attention.rope_dim),
        expanded=2 * attention.heads * (attention.nope_dim + attention.rope_dim + attention.value_dim),
    )


def _indexer(indexer: IndexerSpec) -> Kept:
    return Kept(
        memory=Memory.INDEXER,
        token=indexer.head_dim + 4 * -(-indexer.head_dim // _SCALED),
        score=2 * indexer.heads * indexer.head_dim,
    )


def _delta(attention: GatedDelta) -> Kept:
    state = attention.value_heads * attention.key_dim * attention.value_dim
    channels = 2 * attention.key_heads * attention.key_dim + attention.value_heads * attention.value_dim
    return Kept(
        memory=Memory.STATE,
        fixed=state * _STATE_BYTES[attention.state_dtype] + 2 * channels * (attention.kernel - 1),
        # Decay, the state's guess, its correction, the answer: one, two, two and two operations per element.
        score=7 * state + 2 * channels * attention.kernel,
        heads=attention.key_heads,
    )
