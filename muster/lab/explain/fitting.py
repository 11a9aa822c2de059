"""Where a model fits: every GPU we know, in the numbers that machines are sold with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from muster.checkpoint.inventory import Inventory
from muster.lab.explain.gpus import GPUS, Gpu
from muster.lab.explain.limit import Limit
from muster.lab.explain.machine import COUNTS
from muster.lab.explain.memory import Demand, Load, demand
from muster.lab.explain.split import Split, legal
from muster.lab.explain.traffic import Step, Work, work


@dataclass(frozen=True)
class Fit:
    """A model on some GPUs of one kind.

    Attributes:
        gpu: which.
        split: how it is cut: tensor-parallel where that is legal, else with whole experts on each GPU, else with the
            attention copied too.
        demand: what one GPU must hold.
        limit: a decode step of the load.
    """

    gpu: Gpu
    split: Split
    demand: Demand
    limit: Limit

    @property
    def fits(self) -> bool:
        """Whether it does."""
        return self.demand.fits(self.gpu.budget)

    @property
    def tokens(self) -> int | None:
        """Tokens of context that fit; None: any number."""
        return self.demand.tokens(self.gpu.budget)


def fits(inventory: Inventory, load: Load, gpus: Sequence[Gpu] = GPUS) -> Iterator[tuple[Gpu, tuple[Fit | None, ...]]]:
    """Each GPU with its fits by the numbers in `COUNTS`; None where no way of cutting the model is legal."""
    step = Step(sequences=load.sequences, past=load.context, cache=load.cache)
    cuts: list[tuple[Split, Demand, tuple[Work, ...]] | None] = []
    for count in COUNTS:
        split = next(
            (one for one in (Split(count), Split(count, count), Split(1, count)) if legal(inventory, one)), None
        )
        cut = None if split is None else (split, demand(inventory, split, load), work(inventory, split, step))
        cuts.append(cut)
    for gpu in gpus:
        yield gpu, tuple(cut and Fit(gpu, cut[0], cut[1], Limit.of(cut[2], gpu)) for cut in cuts)
