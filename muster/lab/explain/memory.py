"""What one GPU must hold: weights, draft layers, cache and states, workspace; and how much room is left."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from muster.checkpoint.inventory import Inventory, Module
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import MoESpec
from muster.errors import UsageError
from muster.lab.explain.cache import CacheFormat, SequenceMemory
from muster.lab.explain.split import Split, share

CHUNK = 8192
"""Prompt tokens that one step takes at most, over all GPUs; the workspace is sized for it."""


@dataclass(frozen=True)
class Load:
    """What a server is asked to hold: sequences, the tokens of each, the cache's format."""

    sequences: int = 1
    context: int = 4096
    cache: CacheFormat = "bf16"


def load_of(batch: int, context: int) -> Load:
    """The load of command-line options.

    Raises:
        UsageError: numbers that make no sense.
    """
    checks = {"--batch": (batch, 1, 1 << 20), "--context": (context, 0, 1 << 30)}
    problems = [
        UsageError(name, found=str(value), expected=f"from {low} to {high:,}")
        for name, (value, low, high) in checks.items()
        if not low <= value <= high
    ]
    error = UsageError.only_or_all("options", problems)
    if error is not None:
        raise error
    return Load(batch, context)


@dataclass(frozen=True)
class Demand:
    """Bytes that the fullest GPU must hold.

    Attributes:
        weights: the decoder's, embedding and output head included, vision towers left out.
        draft: the draft (MTP) layers'.
        cache: keys, values, latents and states of the load, those of draft layers included.
        workspace: activations of a step, an estimate.
        token: of the cache, for each token of context.
        fixed: of the cache, whatever the context: states and full windows.
        replicas: copies of the attention, each with sequences of its own.
    """

    weights: float
    draft: float
    cache: float
    workspace: float
    token: float
    fixed: float
    replicas: int

    @property
    def total(self) -> float:
        """Everything together."""
        return self.weights + self.draft + self.cache + self.workspace

    def fits(self, budget: float) -> bool:
        """Whether it fits into so many bytes."""
        return self.total <= budget

    def tokens(self, budget: float) -> int | None:
        """Tokens of context, over all sequences and GPUs, that fit beside the rest; None: any number."""
        room = budget - self.weights - self.draft - self.workspace - self.fixed
        return max(0, int(room / self.token)) * self.replicas if self.token else None


def demand(inventory: Inventory, split: Split, load: Load) -> Demand:
    """What a split and a load demand of the fullest GPU."""
    memories = [SequenceMemory.of(inventory.spec, load.cache)]
    memories += [SequenceMemory.of_draft(inventory.spec, load.cache)] * len(inventory.draft_layers)
    sequences = -(-load.sequences // split.replicas)
    return Demand(
        weights=_sum(inventory, split, lambda module: not module.draft),
        draft=_sum(inventory, split, lambda module: module.draft),
        cache=sequences * sum(memory.held(load.context, split.tensor) for memory in memories),
        workspace=_workspace(inventory, split, sequences),
        token=sum(memory.token_bytes(split.tensor) for memory in memories),
        fixed=sequences * sum(memory.fixed(split.tensor) for memory in memories),
        replicas=split.replicas,
    )


def _sum(inventory: Inventory, split: Split, wanted: Callable[[Module], bool]) -> float:
    modules = (module for module in inventory.modules.values() if wanted(module))
    return float(sum(module.nbytes * share(module, inventory.spec, split) for module in modules))


def _workspace(inventory: Inventory, split: Split, sequences: int) -> float:
    """Activations in bf16 of one step of CHUNK tokens, the widest layer's at once, and float32 logits."""
    spec = inventory.spec
    here = CHUNK // split.replicas
    residual = 4 * here * spec.hidden * 2
    projections = max(_projected(inventory, split, number) for number in range(len(spec.layers))) * here * 2
    routed = max((_routed_width(layer.feed_forward, split, spec.hidden) for layer in spec.layers), default=0.0)
    logits = sequences * spec.vocab * 4 / split.tensor
    return residual + max(projections, routed * CHUNK * 2) + logits


def _projected(inventory: Inventory, split: Split, layer: int) -> float:
    """Widths of all attention projections of a layer together, on one GPU."""
    modules = [module for module in inventory.layer(layer) if module.kind in (Kind.ATTENTION, Kind.DELTA)]
    return float(sum(module.shape[-2] * share(module, inventory.spec, split) for module in modules if module.format))


def _routed_width(layer: object, split: Split, hidden: int) -> float:
    """Values per token that the experts of one GPU keep at once: rows in and out, gate and up, their product."""
    if not isinstance(layer, MoESpec):
        return 0.0
    return layer.routing.top_k / split.expert * (2 * hidden + 3 * layer.inner / split.expert_cuts)
