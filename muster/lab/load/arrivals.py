"""When requests are due: a clock that does not ask how the server fares."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from muster.errors import UsageError

BURST = 3.0
"""Coefficient of variation of `burst` where none is named."""
_MOST = 20.0
"""Above it a run sees a handful of bursts at most."""


@dataclass(frozen=True)
class Arrivals:
    """Independent gaps from a gamma distribution, told by how much they vary.

    Attributes:
        name: for people.
        variation: standard deviation of a gap over its mean. 0: a metronome; 1: a Poisson process; more: bursts with
            silence between them.
    """

    name: str
    variation: float

    @classmethod
    def parse(cls, text: str) -> Arrivals:
        """`constant`, `poisson`, `burst`, or `burst:X` with a coefficient of variation.

        Raises:
            UsageError: another text.
        """
        if text in _NAMED:
            return cls(text, _NAMED[text])
        name, _, number = text.partition(":")
        try:
            variation = float(number)
        except ValueError:
            variation = 0.0
        if name == "burst" and 1 < variation <= _MOST:
            return cls(text, variation)
        expected = f"{', '.join(_NAMED)}, or burst:X with a coefficient of variation above 1 and at most {_MOST:g}"
        raise UsageError("--arrivals", found=text, expected=expected)

    def times(self, rate: float, seed: int) -> Iterator[float]:
        """Seconds at which requests are due, without end, the first at 0; at another rate the same pattern, scaled.

        Args:
            rate: requests per second in the long run.
            seed: of the gaps.
        """
        chance = random.Random(f"arrivals {seed}")
        now = 0.0
        while True:
            yield now
            now += self._gap(chance) / rate

    def _gap(self, chance: random.Random) -> float:
        if self.variation == 0:
            return 1.0
        square = self.variation**2
        return chance.gammavariate(1 / square, square)


_NAMED: Mapping[str, float] = MappingProxyType({"constant": 0.0, "poisson": 1.0, "burst": BURST})
