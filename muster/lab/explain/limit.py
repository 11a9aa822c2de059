"""The least time that a GPU needs for a step: each component's bytes, operations and messages over what it can do."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from muster.checkpoint.inventory import Inventory
from muster.lab.explain.gpus import Gpu, Link
from muster.lab.explain.split import Split
from muster.lab.explain.traffic import Component, Message, Rate, Step, Work, work


class Bound(StrEnum):
    """What a component waits for."""

    MEMORY = "memory"
    COMPUTE = "compute"
    LINK = "link"


class Line(NamedTuple):
    """One component's least time, and what sets it."""

    work: Work
    seconds: float
    bound: Bound

    @property
    def component(self) -> Component:
        """The component."""
        return self.work.component


@dataclass(frozen=True)
class Limit:
    """The least time of a step: components one after the other, nothing overlapped between them."""

    lines: tuple[Line, ...]

    @classmethod
    def of(cls, parts: Iterable[Work], gpu: Gpu) -> Limit:
        """The limit of components that were already counted."""
        return cls(tuple(_line(part, gpu) for part in parts))

    @property
    def seconds(self) -> float:
        """The step."""
        return sum(line.seconds for line in self.lines)

    @property
    def local(self) -> float:
        """The step without what the GPUs say to each other."""
        return sum(line.seconds for line in self.lines if line.bound is not Bound.LINK)

    @property
    def bytes(self) -> float:
        """Bytes through the memory of one GPU."""
        return sum(line.work.bytes for line in self.lines)

    @property
    def operations(self) -> float:
        """Multiplications and additions on one GPU."""
        return sum(sum(line.work.operations.values()) for line in self.lines)

    def of_component(self, component: Component) -> float:
        """Seconds of one component."""
        return sum(line.seconds for line in self.lines if line.component is component)

    @property
    def largest(self) -> Line:
        """The component that takes longest."""
        return max(self.lines, key=lambda line: line.seconds)


def limit(inventory: Inventory, split: Split, step: Step, gpu: Gpu) -> Limit:
    """The limit of a step on GPUs of one kind."""
    return Limit.of(work(inventory, split, step), gpu)


def _line(part: Work, gpu: Gpu) -> Line:
    if part.messages:
        return Line(part, sum(message_time(message, gpu.link) for message in part.messages), Bound.LINK)
    reading = part.bytes / gpu.bandwidth
    computing = compute_time(part.operations.items(), gpu)
    return Line(part, max(reading, computing), Bound.MEMORY if reading >= computing else Bound.COMPUTE)


def compute_time(operations: Iterable[tuple[Rate, float]], gpu: Gpu) -> float:
    """Seconds at the tensor cores' rates; formats that a GPU has none for run at the next wider rate that it has."""
    return sum(count / rate for kind, count in operations if (rate := usable_rate(kind, gpu)[1]))


def usable_rate(kind: Rate, gpu: Gpu) -> tuple[str, float]:
    """The rate that a product of this kind can have, by its name; ("", 0) where none is known."""
    wider: dict[Rate, tuple[str, ...]] = {"fp4": ("fp4", "fp8", "bf16"), "fp8": ("fp8", "bf16"), "bf16": ("bf16",)}
    return next(((name, gpu.rates[name]) for name in wider[kind] if name in gpu.rates), ("", 0.0))


def message_time(message: Message, link: Link) -> float:
    """Seconds of all calls of a collective: as a ring, or in one step from each to all, whichever is shorter."""
    ranks, piece = message.ranks, message.nbytes / message.ranks
    rounds = 2 if message.operation == "all-reduce" else 1
    ring = rounds * (ranks - 1) * (link.step + piece / link.bandwidth)
    sent = message.nbytes if message.operation == "all-reduce" else piece
    direct = link.step + (ranks - 1) * sent / link.bandwidth
    return message.times * (link.start + min(ring, direct))
