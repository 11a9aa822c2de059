"""What one step of a model must move and compute on the fullest GPU, component by component. No times: `roofline.py`
divides by what a GPU can do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Literal, NamedTuple

from muster.checkpoint.inventory import Inventory, Module
from muster.checkpoint.kinds import Kind
from muster.checkpoint.names import Names
from muster.checkpoint.shapes import draft_layer
from muster.checkpoint.spec import ModelSpec, MoESpec
from muster.formats.spec import Element
from muster.lab.explain.cache import CacheFormat, Memory, SequenceMemory
from muster.lab.explain.split import Split, share


class Component(StrEnum):
    """Parts of a step that have a floor of their own."""

    PROJECTIONS = "attention projections"
    KEYS = "attention over the cache"
    STATES = "linear-attention states"
    ROUTER = "router and norms"
    ROUTED = "routed experts"
    SHARED = "shared experts"
    DENSE = "dense layers"
    JOIN = "draft join"
    HEAD = "output head"
    LINKS = "collectives"


_COMPONENTS: Mapping[Kind, Component] = MappingProxyType(
    {
        Kind.ATTENTION: Component.PROJECTIONS,
        Kind.DELTA: Component.PROJECTIONS,
        Kind.INDEXER: Component.PROJECTIONS,
        Kind.ROUTER: Component.ROUTER,
        Kind.NORM: Component.ROUTER,
        Kind.ROUTED: Component.ROUTED,
        Kind.SHARED: Component.SHARED,
        Kind.DENSE: Component.DENSE,
        Kind.JOIN: Component.JOIN,
        Kind.HEAD: Component.HEAD,
    }
)
"""Kinds that a step reads whole; an embedding is read by the row, a vision tower not at all."""

Rate = Literal["bf16", "fp8", "fp4"]


@dataclass(frozen=True)
class Step:
    """One pass through the model.

    Attributes:
        sequences: B, over all GPUs.
        tokens: new tokens of each: 1 in decode, the drafts and one more when they are verified, the prompt in prefill.
        past: tokens that each sequence holds already.
        answers: tokens of each sequence whose logits are wanted.
        cache: format of keys, values and latents.
        draft: the pass is one draft layer's, not the decoder's.
    """

    sequences: int = 1
    tokens: int = 1
    past: int = 0
    answers: int = 1
    cache: CacheFormat = "bf16"
    draft: bool = False

    @property
    def all_tokens(self) -> int:
        """New tokens of all sequences."""
        return self.sequences * self.tokens


class Message(NamedTuple):
    """A collective over `ranks` GPUs, `times` per step; `nbytes` is the whole array that all of them have or get."""

    operation: Literal["all-reduce", "all-gather", "reduce-scatter"]
    ranks: int
    nbytes: int
    times: int


@dataclass(frozen=True)
class Work:
    """What one component costs the fullest GPU in one step.

    Attributes:
        component: which.
        weight_bytes: stored weights and scales that are read.
        cache_bytes: cache and states, read and written.
        operations: multiplications and additions by the fastest tensor-core rate that the formats allow.
        messages: what is sent.
    """

    component: Component
    weight_bytes: float = 0.0
    cache_bytes: float = 0.0
    operations: Mapping[Rate, float] = field(default_factory=dict)
    messages: tuple[Message, ...] = ()

    @property
    def bytes(self) -> float:
        """Bytes through the memory."""
        return self.weight_bytes + self.cache_bytes


def work(inventory: Inventory, split: Split, step: Step) -> tuple[Work, ...]:
    """The components of a step, those with nothing to do left out."""
    parts = [*_weights(inventory, split, step), *_memory(inventory.spec, split, step)]
    messages = tuple(_messages(inventory.spec, split, step))
    if messages:
        parts.append(Work(Component.LINKS, messages=messages))
    order = list(Component)
    return tuple(sorted(parts, key=lambda part: order.index(part.component)))


def distinct_share(chance: float, tokens: int) -> float:
    """The part of the experts that tokens touch on average, if each goes to an expert by `chance`: 1 - (1 - k/E)^T.

    Real routing is neither uniform nor independent; it touches fewer.
    """
    return 1 - (1 - chance) ** tokens


def active_parameters(inventory: Inventory) -> float:
    """Parameters that one token uses: all but the embedding, the draft layers and the experts it is not sent to."""
    return sum(module.parameters * _chosen(module, inventory.spec, 1) for module in decoder_modules(inventory))


def token_bytes(inventory: Inventory) -> Mapping[str, float]:
    """Weight bytes that one token reads by the format they are stored in, the most first."""
    sums: dict[str, float] = defaultdict(float)
    for module in decoder_modules(inventory):
        sums[module.stored] += module.nbytes * _chosen(module, inventory.spec, 1)
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def decoder_modules(inventory: Inventory) -> Iterator[Module]:
    """The modules that a step of the decoder reads."""
    return _read(inventory, draft=False)


def _read(inventory: Inventory, *, draft: bool) -> Iterator[Module]:
    """The modules that a pass goes through; a draft is the first draft layer and the model's own output head."""
    tied, depth = inventory.spec.tied_embeddings, len(inventory.spec.layers)
    for module in inventory.modules.values():
        head = module.kind is Kind.HEAD or (tied and module.kind is Kind.EMBEDDING)
        if head:
            if not module.draft:
                yield module
        elif module.kind in _COMPONENTS and module.draft is draft and (not draft or module.layer == depth):
            yield module


def _chosen(module: Module, spec: ModelSpec, tokens: int) -> float:
    """The part of a module's matrices that tokens touch."""
    if module.kind is not Kind.ROUTED:
        return 1.0
    return distinct_share(_chance(spec), tokens)


def _chance(spec: ModelSpec) -> float:
    """How likely a token is to go to one of the experts; 1 where the config knows of none, though files hold some."""
    layers = (layer.feed_forward for layer in reversed(spec.layers))
    moe = next((layer for layer in layers if isinstance(layer, MoESpec)), None)
    return 1.0 if moe is None else moe.routing.top_k / moe.experts


def _weights(inventory: Inventory, split: Split, step: Step) -> Iterator[Work]:
    spec = inventory.spec
    nbytes: dict[Component, float] = defaultdict(float)
    operations: dict[Component, dict[Rate, float]] = defaultdict(lambda: defaultdict(float))
    for module in _read(inventory, draft=step.draft):
        component = _COMPONENTS.get(module.kind, Component.HEAD)
        part = float(share(module, spec, split))
        nbytes[component] += module.nbytes * part * _chosen(module, spec, step.all_tokens)
        if module.kind is not Kind.NORM:
            rows = _rows(module, spec, split, step)
            operations[component][_rate(module)] += 2 * module.parameters * part * rows
    for component, total in nbytes.items():
        yield Work(component, weight_bytes=total, operations=dict(operations[component]))


def _rows(module: Module, spec: ModelSpec, split: Split, step: Step) -> float:
    """Rows that each parameter of a module meets: tokens, of which a routed expert gets its share."""
    if module.kind is Kind.ROUTED:
        return step.all_tokens * _chance(spec)
    sequences = _local(step.sequences, split)
    return sequences * (step.answers if module.kind in (Kind.HEAD, Kind.EMBEDDING) else step.tokens)


def _local(sequences: int, split: Split) -> int:
    """Sequences on the GPU that has the most of them."""
    return -(-sequences // split.replicas)


def _rate(module: Module) -> Rate:
    """The tensor-core rate that weights and inputs of this kind allow."""
    if module.format is None or module.activations == "none":
        return "bf16"
    if module.format.element is Element.E2M1:
        return "fp4"
    return "fp8" if module.format.element is Element.E4M3 else "bf16"


def _memory(spec: ModelSpec, split: Split, step: Step) -> Iterator[Work]:
    memory = (SequenceMemory.of_draft if step.draft else SequenceMemory.of)(spec, step.cache)
    states = [kept for kept in memory.layers if kept.memory is Memory.STATE]
    keys = [kept for kept in memory.layers if kept.memory is not Memory.STATE]
    sequences = _local(step.sequences, split)
    for component, layers in ((Component.KEYS, keys), (Component.STATES, states)):
        if layers:
            nbytes = sum(kept.read(step.past, step.tokens) * kept.share(split.tensor) for kept in layers)
            operations = sum(kept.operations(step.past, step.tokens) for kept in layers) / split.tensor
            rate: dict[Rate, float] = {"bf16": sequences * operations}
            yield Work(component, cache_bytes=sequences * nbytes, operations=rate)


def _messages(spec: ModelSpec, split: Split, step: Step) -> Iterator[Message]:
    """The collectives of a step, in bf16: after the attention, around or after the experts, at both ends."""
    here = _local(step.sequences, split) * step.tokens * spec.hidden * 2
    everywhere = step.all_tokens * spec.hidden * 2
    layers = [draft_layer(Names(spec)).feed_forward] if step.draft else [layer.feed_forward for layer in spec.layers]
    if split.tensor > 1:
        yield Message("all-reduce", split.tensor, here, len(layers) + 1)
        logits = _local(step.sequences, split) * step.answers * spec.vocab * 2
        yield Message("all-gather", split.tensor, logits, 1)
    sparse = sum(isinstance(layer, MoESpec) for layer in layers)
    if split.replicas > 1:
        yield Message("all-gather", split.gpus, everywhere, sparse)
        yield Message("reduce-scatter", split.gpus, everywhere, sparse)
    elif split.gpus > 1:
        yield Message("all-reduce", split.gpus, everywhere, sparse)
    if split.tensor > 1 and sparse < len(layers):
        yield Message("all-reduce", split.tensor, here, len(layers) - sparse)
