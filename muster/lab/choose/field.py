"""The contenders for one part of a model side by side: who may run how many tokens, and how long each takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from muster.lab.ledger.evidence import Timing, Verdict
from muster.lab.measure.race import sample_of
from muster.lab.measure.timing import tie
from muster.lab.prove.standing import Standing


@dataclass(frozen=True)
class Field:
    """The contenders for one part and what is known of them.

    Attributes:
        standings: of every contender in every token bucket; contenders in the registry's order, buckets rising.
        times: of proven backends, by name and bucket; a bucket where only one is proven may have none.
        uses: how many times the model has the part.
    """

    standings: tuple[Standing, ...]
    times: Mapping[tuple[str, int], Timing]
    uses: int

    def __post_init__(self) -> None:
        untimed = [(name, bucket) for bucket, able in self.able.items() for name in able if len(able) > 1]
        assert all(pair in self.times for pair in untimed), "rivals have been timed against each other"

    @cached_property
    def buckets(self) -> tuple[int, ...]:
        """Token counts, rising."""
        return tuple(sorted({standing.tokens for standing in self.standings}))

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Every contender; earlier ones are the simpler."""
        return tuple(dict.fromkeys(standing.contender.backend for standing in self.standings))

    @cached_property
    def able(self) -> Mapping[int, tuple[str, ...]]:
        """By bucket, the backends that are proven there."""
        proven = [one for one in self.standings if one.verdict is Verdict.PROVEN]
        return {bucket: tuple(s.contender.backend for s in proven if s.tokens == bucket) for bucket in self.buckets}

    @property
    def key(self) -> str:
        """The part's name."""
        return self.standings[0].contender.part.key

    def of(self, name: str) -> tuple[Standing, ...]:
        """How one backend stands."""
        return tuple(standing for standing in self.standings if standing.contender.backend == name)

    def bound(self, name: str) -> int | None:
        """The most tokens a backend is meant for; None: any."""
        return next(one for one in self.standings if one.contender.backend == name).contender.max_tokens

    def unbounded(self, names: Sequence[str]) -> tuple[str, ...]:
        """Those of these backends that are meant for any token count."""
        return tuple(name for name in names if self.bound(name) is None)

    def layout_bytes(self, names: Collection[str]) -> int:
        """What the layouts of these backends keep beside the stored weights, in all of the part's uses."""
        shared = {one.contender.backend: one.contender.layout or one.contender.backend for one in self.standings}
        layouts: dict[str, int] = {}
        for (name, _), timing in self.times.items():
            layouts[shared[name]] = max(timing.layout_bytes, layouts.get(shared[name], 0))
        return self.uses * sum(layouts.get(layout, 0) for layout in {shared[name] for name in names})

    def fastest(self, bucket: int, names: Sequence[str]) -> str | None:
        """Of these backends the one with the shortest median; None where none of them is proven."""
        able = [name for name in self.able[bucket] if name in names]
        return able[0] if len(able) == 1 else min(able, key=lambda name: self.times[name, bucket].median, default=None)

    def tied(self, bucket: int, name: str, other: str) -> bool:
        """Whether neither is faster."""
        return name == other or tie(*(sample_of(self.times[each, bucket]) for each in (name, other)))

    def factor(self, bucket: int, name: str, other: str) -> float:
        """How many times as long one backend takes as another."""
        return 1.0 if name == other else self.times[name, bucket].median / self.times[other, bucket].median
