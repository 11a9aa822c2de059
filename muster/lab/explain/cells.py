"""Cells: a part of a model, or a plain layer in some format, on a device, with every backend's answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from muster.checkpoint.inventory import Inventory
from muster.checkpoint.loader import Loader
from muster.device import Device
from muster.errors import UsageError
from muster.lab.explain.offers import Offer, offers
from muster.lab.explain.stored_parts import plain_parts, stored_parts
from muster.lab.prove.parts import Part, Role, parts
from muster.model.families import FAMILIES


@dataclass(frozen=True)
class Cell:
    """Every backend of a part's kind on one part and one device: who could, and who not for which reasons."""

    part: Part
    device: Device
    offers: tuple[Offer, ...]

    @property
    def runs(self) -> bool:
        """Whether some backend can be run."""
        return any(offer.runs for offer in self.offers)

    @property
    def possible(self) -> tuple[Offer, ...]:
        """Those whose facts allow it, adapter or not."""
        return tuple(offer for offer in self.offers if offer.possible)

    @property
    def refused(self) -> tuple[Offer, ...]:
        """Those with reasons against."""
        return tuple(offer for offer in self.offers if not offer.possible)


def cells(model: str | None, devices: Sequence[Device], roles: Sequence[Role] = tuple(Role)) -> tuple[Cell, ...]:
    """Every part of a model, or of a plain layer in every format, on every device.

    Args:
        model: a checkpoint directory, a config.json or the name of a released checkpoint; None: the plain layer.
        devices: where.
        roles: which parts.

    Raises:
        UsageError: a model without such parts.
        MusterError: a model that cannot be read.
    """
    inventory = Inventory.of(model) if model is not None else None
    found = [(part, device) for device in devices for part in _parts(inventory, device) if part.role in roles]
    if not found:
        raise UsageError("--role", found=", ".join(roles), expected=f"a role that {model} has")
    return tuple(Cell(part, device, offers(part, device)) for part, device in found)


def _parts(inventory: Inventory | None, device: Device) -> tuple[Part, ...]:
    """What a run would build where one is possible here, else what is stored."""
    if inventory is None:
        return plain_parts(device)
    if inventory.index is not None and device.present and inventory.spec.family in FAMILIES:
        return parts(Loader.open(inventory.index.directory, draft=True), device)
    return stored_parts(inventory, device)
