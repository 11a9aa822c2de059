"""What `muster inspect` finds out about a model, from config and headers alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from muster.checkpoint.inventory import Group, Inventory
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import MoESpec, RoutingSpec
from muster.lab.explain.cache import Kept, Memory, SequenceMemory
from muster.lab.explain.drafting import Drafting
from muster.lab.explain.fitting import Fit, fits
from muster.lab.explain.gpus import Gpu
from muster.lab.explain.limit import limit
from muster.lab.explain.machine import COUNTS, Machine
from muster.lab.explain.memory import Demand, Load, demand
from muster.lab.explain.split import Hindrance, Split, hindrances, nearest
from muster.lab.explain.traffic import Step, active_parameters, token_bytes

_MINOR = 0.01
"""Tensors without a scheme (norms, biases) count with their kind's matrices below this share of them."""


@dataclass(frozen=True)
class Inspection:
    """A model, and what is asked of machines that would serve it.

    Attributes:
        inventory: the model.
        load: sequences and their context.
        machines: those that were asked for by name.
        split: the split that was asked for, None when none was.
    """

    inventory: Inventory
    load: Load
    machines: tuple[Machine, ...] = ()
    split: Split | None = None

    @property
    def experts(self) -> MoESpec | None:
        """The expert layers' spec; None for a model without them."""
        layers = (layer.feed_forward for layer in reversed(self.inventory.spec.layers))
        return next((layer for layer in layers if isinstance(layer, MoESpec)), None)

    @cached_property
    def parameters(self) -> int:
        """Parameters of the decoder, embedding and head included, draft layers and vision towers left out."""
        modules = self.inventory.modules.values()
        return sum(module.parameters for module in modules if not module.draft and module.kind is not Kind.VISION)

    @cached_property
    def active(self) -> float:
        """Parameters that one token uses."""
        return active_parameters(self.inventory)

    @cached_property
    def token_bytes(self) -> Mapping[str, float]:
        """Weight bytes that a token reads, by stored format."""
        return token_bytes(self.inventory)

    @cached_property
    def drafting(self) -> Drafting:
        """The draft layers."""
        return Drafting.of(self.inventory)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """What is stored how, a few norms and biases counted with their kind."""
        whole: dict[tuple[Kind, bool], Group] = {}
        rows: list[Group] = []
        for group in self.inventory.groups:
            first = whole.setdefault((group.kind, group.draft), group)
            minor = not group.scheme and group is not first and group.nbytes < _MINOR * first.nbytes
            if not minor:
                rows.append(group)
                continue
            sums = {name: getattr(first, name) + getattr(group, name) for name in _SUMMED}
            whole[group.kind, group.draft] = merged = first._replace(**sums)
            rows[rows.index(first)] = merged
        return tuple(rows)

    @cached_property
    def memories(self) -> Mapping[Memory, tuple[Kept, ...]]:
        """What a sequence keeps, by kind, in BF16."""
        return SequenceMemory.of(self.inventory.spec).by_memory()

    def splits(self) -> Iterator[tuple[Split, tuple[Hindrance, ...], tuple[Split, ...]]]:
        """The usual splits and the one asked for, what each does not divide, and legal ones near those that fail."""
        usual = [split for count in COUNTS[1:] for split in (Split(count), Split(count, count), Split(1, count))]
        asked = [self.split] if self.split is not None and self.split.gpus > 1 else []
        for split in dict.fromkeys((*asked, *usual)):
            found = hindrances(self.inventory, split)
            near = () if all(one.harmless for one in found) else nearest(self.inventory, split)
            yield split, found, near

    def fits(self) -> Iterator[tuple[Gpu, tuple[Fit | None, ...]]]:
        """Every GPU we know in the usual numbers."""
        return fits(self.inventory, self.load)

    def demand(self, split: Split) -> Demand:
        """Memory of the fullest GPU."""
        return demand(self.inventory, split, self.load)

    def fit(self, machine: Machine) -> Fit:
        """A machine that was asked for."""
        load = self.load
        step = Step(sequences=load.sequences, past=load.context, cache=load.cache)
        found = limit(self.inventory, machine.split, step, machine.gpu)
        return Fit(machine.gpu, machine.split, self.demand(machine.split), found)

    def document(self) -> dict[str, Any]:
        """Everything but machines and backends, for `--json`."""
        inventory, moe = self.inventory, self.experts
        return {
            "model": inventory.name,
            "source": inventory.source,
            "family": inventory.spec.family,
            "architecture": inventory.spec.architecture,
            "layers": len(inventory.spec.layers),
            "parameters": {
                "decoder": self.parameters,
                "active": self.active,
                "draft": self.drafting.parameters,
                "all": inventory.parameters,
            },
            "bytes": inventory.nbytes,
            "tensors": inventory.tensors,
            "stored": [group._asdict() for group in self.groups],
            "bytes_per_token": dict(self.token_bytes),
            "experts": None if moe is None else asdict(moe),
            "draft": asdict(self.drafting),
            "sequence": [_memory_document(kind, layers) for kind, layers in self.memories.items()],
            "cache_declared": inventory.spec.quant.kv_cache if inventory.spec.quant is not None else None,
            "splits": [
                {
                    "tensor": split.tensor,
                    "expert": split.expert,
                    "legal": all(one.harmless for one in found),
                    "hindrances": [one._asdict() for one in found],
                    "near": [{"tensor": one.tensor, "expert": one.expert} for one in near],
                }
                for split, found, near in self.splits()
            ],
            "disagreements": list(inventory.disagreements),
            "notes": list(inventory.notes),
        }


_SUMMED = ("modules", "tensors", "parameters", "nbytes")


def _memory_document(kind: Memory, layers: tuple[Kept, ...]) -> dict[str, Any]:
    return {
        "memory": kind.value,
        "layers": len(layers),
        "bytes_per_token": sum(kept.token for kept in layers if kept.window is None),
        "bytes_per_sequence": sum(kept.held(0) + kept.token * (kept.window or 0) for kept in layers),
        "window": layers[0].window,
        "chosen": layers[0].chosen,
    }


def routing_words(routing: RoutingSpec) -> str:
    """A routing rule for a reader."""
    if routing.softmax_after_top_k:
        words = [f"top {routing.top_k} of the logits, softmax over those"]
    else:
        words = [f"{routing.scoring} over all, top {routing.top_k}"]
        words += ["a bias for the choice alone"] if routing.selection_bias else []
        if routing.groups > 1:
            words.append(f"from the best {routing.groups_kept} of {routing.groups} groups")
        words.append("renormalised" if routing.renormalise else "not renormalised")
    words += [f"times {routing.scaling_factor:g}"] if routing.scaling_factor != 1 else []
    return ", ".join(words)
