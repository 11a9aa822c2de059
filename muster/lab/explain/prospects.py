"""Which backends could compute a checkpoint's experts on a GPU that need not be here, and why each other one not."""

from __future__ import annotations

from dataclasses import dataclass, replace

from muster.checkpoint.inventory import Inventory
from muster.device import Device
from muster.errors import UsageError
from muster.lab.explain.gpus import Gpu
from muster.lab.explain.offers import Offer, offers
from muster.lab.explain.split import Split
from muster.lab.explain.stored_parts import stored_parts
from muster.lab.prove.parts import Part, Role, on_rank
from muster.moe.problem import MoEProblem


@dataclass(frozen=True)
class Prospect:
    """One kind of expert layer, and every backend's answer to it.

    Attributes:
        part: the layer as one rank has it.
        offers: the answers.
    """

    part: Part
    offers: tuple[Offer, ...]

    @property
    def title(self) -> str:
        """What the part is, for a reader."""
        draft = "draft " if self.part.role is Role.DRAFT else ""
        return f"{draft}experts in {self.part.problem.weights.name.upper()}"

    @property
    def possible(self) -> tuple[Offer, ...]:
        """Those whose facts allow it."""
        return tuple(offer for offer in self.offers if offer.possible)

    @property
    def refused(self) -> tuple[Offer, ...]:
        """Those with reasons against it."""
        return tuple(offer for offer in self.offers if not offer.possible)


def prospects(inventory: Inventory, gpu: Gpu, split: Split, *, here: bool = False) -> tuple[Prospect, ...]:
    """The expert layers of decoder and draft on one rank of a split.

    Packages count only on a GPU that is `here`. A split that leaves a rest is taken as if it were not there: what is
    wrong with it is said elsewhere.
    """
    device = Device(gpu.device, gpu.name, gpu.memory, gpu.multiprocessors, present=here)
    experts = [part for part in stored_parts(inventory, device) if part.role is not Role.LINEARS]
    return tuple(_prospect(part, split, device) for part in experts)


def _prospect(part: Part, split: Split, device: Device) -> Prospect:
    assert isinstance(part.problem, MoEProblem), part
    try:
        problem = on_rank(part.problem, split.expert_cuts, split.expert, 0)
    except UsageError:
        problem = part.problem
    part = replace(part, problem=problem)
    return Prospect(part, offers(part, device))
