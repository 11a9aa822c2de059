"""One rate in numbers: percentiles, throughput, and how many requests met the objective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from muster.lab.load.objective import Objective
from muster.lab.load.outcome import Kind, Outcome
from muster.lab.load.stage import Stage

_COARSE = 0.1
"""Part of what is measured that the client's own lag may be."""
_FINE = 0.002
"""Seconds of lag that an event loop has anyway."""


@dataclass(frozen=True)
class Spread:
    """Percentiles, linear between neighbours, and the maximum; seconds."""

    p50: float
    p90: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Of at least one value; None for none."""
        ordered = sorted(values)
        if not ordered:
            return None
        return cls(*(_percentile(ordered, share) for share in (0.5, 0.9, 0.99, 1.0)))


@dataclass(frozen=True)
class Figures:
    """What a stage showed.

    Attributes:
        rate: requests per second that were due.
        seconds: from the first due time to the last end.
        sent, completed: requests.
        failures: how many failed for each reason, in the words of the first of them.
        ttft: seconds to the first token.
        tbt: seconds between tokens, over the tokens of all answers.
        e2e: seconds to the end of an answer.
        prompt_tokens, answer_tokens: of completed requests, as the server counted.
        asked_prompt_tokens: of the same, as asked for.
        short: answers with fewer tokens than asked for.
        met: requests within the objective; None: there is none.
        judged: requests that an interrupt did not end.
        lag: seconds by which the client itself was late.
        interrupted: whether the user stopped it.
    """

    rate: float
    seconds: float
    sent: int
    completed: int
    failures: Mapping[str, int]
    ttft: Spread | None
    tbt: Spread | None
    e2e: Spread | None
    prompt_tokens: int
    answer_tokens: int
    asked_prompt_tokens: int
    short: int
    met: int | None
    judged: int
    lag: Spread | None
    interrupted: bool

    @classmethod
    def of(cls, stage: Stage, objective: Objective) -> Figures:
        """Of a stage that is over."""
        answered = [(one, one.answer) for one in stage.outcomes if one.answer]
        return cls(
            rate=stage.rate,
            seconds=stage.seconds,
            sent=stage.sent,
            completed=len(answered),
            failures=_failures(stage.outcomes),
            ttft=Spread.of(one.first_token for one, _ in answered if one.first_token is not None),
            tbt=Spread.of(gap for _, answer in answered for gap in answer.gaps()),
            e2e=Spread.of(one.whole for one, _ in answered if one.whole is not None),
            prompt_tokens=sum(answer.prompt_tokens for _, answer in answered),
            answer_tokens=sum(answer.tokens for _, answer in answered),
            asked_prompt_tokens=sum(one.asked.prompt for one, _ in answered),
            short=sum(answer.tokens < one.asked.answer for one, answer in answered),
            met=sum(map(objective.met_by, stage.outcomes)) if objective.limits else None,
            judged=sum(one.failure is None or one.failure.kind is not Kind.INTERRUPTED for one in stage.outcomes),
            lag=Spread.of(stage.lag.seconds),
            interrupted=stage.interrupted,
        )

    @property
    def share(self) -> float | None:
        """Of requests within the objective, failed ones counted as not."""
        return self.met / self.judged if self.met is not None and self.judged else None

    @property
    def coarse(self) -> bool:
        """Whether the client's own lag is a part worth mention of what it measured."""
        if self.lag is None or self.ttft is None:
            return False
        measured = min(self.ttft.p50, self.tbt.p99 if self.tbt else self.ttft.p50)
        return self.lag.p99 > max(_FINE, _COARSE * measured)

    def per_second(self, count: float) -> float:
        """So many in the stage's time."""
        return count / self.seconds if self.seconds else 0.0

    def document(self) -> dict[str, Any]:
        """For `--json`."""
        goodput = None if self.met is None else self.per_second(self.met)
        return {
            **asdict(self),
            "failed": self.sent - self.completed,
            "requests_per_second": self.per_second(self.completed),
            "prompt_tokens_per_second": self.per_second(self.prompt_tokens),
            "answer_tokens_per_second": self.per_second(self.answer_tokens),
            "share_met": self.share,
            "goodput": goodput,
        }


def _failures(outcomes: Iterable[Outcome]) -> dict[str, int]:
    """Reasons with the words of the first of each, most frequent first."""
    failures = [one.failure for one in outcomes if one.failure]
    words: dict[str, str] = {}
    for failure in failures:
        words.setdefault(failure.reason, str(failure))
    counts = Counter(failure.reason for failure in failures)
    merged: Counter[str] = Counter()
    for reason, count in counts.most_common():
        merged[words[reason]] += count
    return dict(merged)


def _percentile(ordered: Sequence[float], share: float) -> float:
    place = share * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)
