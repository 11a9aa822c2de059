"""What a service promises its users: how long each request may take."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from muster.errors import UsageError
from muster.lab.load.outcome import Outcome

ENOUGH = 0.9
"""Share of requests that must meet an objective for a rate to count as carried."""
_NAMES = ("ttft", "tbt", "e2e")
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
_LIMIT = re.compile(r"(ttft|tbt|e2e)=([0-9]+(?:\.[0-9]+)?|\.[0-9]+)(us|ms|s|m)")


@dataclass(frozen=True)
class Objective:
    """Limits in seconds; None where there is none.

    Attributes:
        ttft: time to first token.
        tbt: mean time between the tokens of an answer.
        e2e: time to the end of an answer.
    """

    ttft: float | None = None
    tbt: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objective:
        """`ttft=500ms,tbt=50ms,e2e=10s`, or some of these.

        Raises:
            UsageError: another text.
        """
        found = [_LIMIT.fullmatch(part.strip()) for part in text.split(",")]
        limits = {match[1]: float(match[2]) * _UNITS[match[3]] for match in found if match}
        if len(limits) < len(found) or not all(limits.values()):
            raise UsageError("--slo", found=text, expected="some of ttft, tbt and e2e, such as ttft=500ms,tbt=50ms")
        return cls(**limits)

    @property
    def limits(self) -> dict[str, float]:
        """Those that there are, by name."""
        return {name: limit for name in _NAMES if (limit := getattr(self, name)) is not None}

    def met_by(self, outcome: Outcome) -> bool:
        """Whether a request met all limits; one that failed did not."""
        return outcome.answer is not None and all(taken <= limit for taken, limit in self._pairs(outcome))

    def _pairs(self, outcome: Outcome) -> Iterator[tuple[float, float]]:
        assert outcome.answer is not None
        gaps = list(outcome.answer.gaps())
        taken = {"ttft": outcome.first_token, "tbt": sum(gaps) / len(gaps) if gaps else None, "e2e": outcome.whole}
        for name, limit in self.limits.items():
            if (seconds := taken[name]) is not None:
                yield seconds, limit
