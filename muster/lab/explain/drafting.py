"""The draft (MTP) layers of a checkpoint: whether they are there, where, stored how, and what they share."""

from __future__ import annotations

from dataclasses import dataclass

from muster.checkpoint.inventory import Inventory
from muster.checkpoint.kinds import Kind
from muster.checkpoint.names import Names


@dataclass(frozen=True)
class Drafting:
    """What a checkpoint has for drafting.

    Attributes:
        declared: layers that the config declares.
        layers: layers that are there.
        place: what their tensors' names start with; empty when there are none.
        files: the files that hold them, those that hold nothing else marked; empty without files.
        stored: their formats by part, the experts' first.
        experts: routed experts of each.
        parameters, nbytes: of all of them.
        copies: bytes of a second embedding and head that repeat the model's own; 0: both are shared.
    """

    declared: int
    layers: tuple[int, ...]
    place: str
    files: tuple[str, ...]
    stored: tuple[tuple[str, str], ...]
    experts: int
    parameters: int
    nbytes: int
    copies: int

    @classmethod
    def of(cls, inventory: Inventory) -> Drafting:
        """That of a checkpoint."""
        modules = [module for module in inventory.modules.values() if module.draft]
        routed = [module for module in modules if module.kind is Kind.ROUTED and len(module.shape) > 1]
        twice = [module for module in modules if module.kind in (Kind.EMBEDDING, Kind.HEAD)]
        matrices = sorted((m for m in modules if m.format is not None), key=lambda module: -module.nbytes)
        roots = _roots(inventory)
        first = next((module for module in routed), None)
        return cls(
            declared=inventory.spec.draft_layers,
            layers=inventory.draft_layers,
            place=" and ".join(f"{root}*" for root in roots),
            files=_files(inventory, roots),
            stored=tuple(dict.fromkeys((module.kind.value, module.stored) for module in matrices)),
            experts=0 if first is None else max(first.count, first.shape[0] if len(first.shape) == 3 else 0),
            parameters=sum(module.parameters for module in modules),
            nbytes=sum(module.nbytes for module in modules),
            copies=sum(module.nbytes for module in twice),
        )

    def text(self) -> str:
        """One line."""
        if not self.layers:
            if self.declared:
                return f"none stored, though the config declares {self.declared}"
            return "none"
        formats = dict.fromkeys(stored for _, stored in self.stored)
        undeclared = "" if self.declared else ", not declared by the config"
        files = f" in {', '.join(self.files)}" if self.files else ""
        return (
            f"{len(self.layers)} layer{'s' if len(self.layers) > 1 else ''} at {self.place}{files}, "
            f"{' and '.join(name.upper() for name in formats)}, {self.experts} experts{undeclared}"
        )


def _roots(inventory: Inventory) -> tuple[str, ...]:
    names = Names(inventory.spec)
    if not inventory.draft_layers:
        return ()
    if names.family.draft == "mtp":
        return ("mtp.",)
    return tuple(f"{names.layer(number)}." for number in inventory.draft_layers)


def _files(inventory: Inventory, roots: tuple[str, ...]) -> tuple[str, ...]:
    if inventory.index is None or not roots:
        return ()
    draft: set[str] = set()
    others: set[str] = set()
    for name, entry in inventory.index.tensors.items():
        (draft if name.startswith(roots) else others).add(entry.file.name)
    return tuple(f"{file}{'' if file in others else ' (of its own)'}" for file in sorted(draft))
