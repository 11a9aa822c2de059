"""What the ledger says of a backend here and now: the evidence that counts on this machine as it is today."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from muster.device import Device
from muster.errors import UnprovenError, UsageError
from muster.lab import units
from muster.lab.ledger import environment
from muster.lab.ledger.evidence import Evidence, Verdict
from muster.lab.ledger.ledger import Ledger
from muster.lab.prove.cases import Case, Part, Role
from muster.lab.prove.contender import Contender

_OF_THE_MOMENT = frozenset({Verdict.HANG, Verdict.OUT_OF_MEMORY})
"""Failures that a busy machine can cause; the same case, proven later, clears them. All others stay: a backend that
was seen to be wrong is not right because it was lucky the next time."""

_ANSWERS = frozenset({Verdict.PROVEN, Verdict.DECLINED, Verdict.MISSING})
"""What settles a case when it does not fail."""


@dataclass(frozen=True)
class Standing:
    """A backend on a part, for calls of `tokens` tokens.

    Attributes:
        contender: the backend and the part.
        tokens: the token bucket.
        verdict: a failure where there is one, else PROVEN when every pattern asked for is, else NOT_TRIED; what the
            backend says itself when it refuses.
        evidence: all that counts for it, failures first, then by how close it came to a limit.
        missing: the patterns asked for that nothing is known of.
    """

    contender: Contender
    tokens: int
    verdict: Verdict
    evidence: tuple[Evidence, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def asked(self) -> bool:
        """Whether the backend is meant for so many tokens."""
        return self.contender.meant_for(self.tokens)

    @property
    def why(self) -> str:
        """Why it is not proven, in a line; empty when it is."""
        if self.verdict.failed:
            return f"{self.evidence[0].message} (evidence {self.evidence[0].id})"
        if self.contender.refusal is not None:
            return "; ".join(self.contender.reasons)
        if not self.asked:
            return f"meant for up to {units.tokens(self.contender.max_tokens or 0)}"
        if self.verdict is Verdict.PROVEN:
            return ""
        if not self.evidence:
            return "no evidence"
        return f"no evidence for {', '.join(self.missing)}" if self.missing else "declines every case"


class Standings:
    """Reads the ledger with the eyes of this machine, its software and the backends' sources as they are now.

    Args:
        ledger: the ledger.
        device: of this machine.
        home: where the tuning tables lie that backends run with; None: MUSTER_HOME.
    """

    def __init__(self, ledger: Ledger, device: Device, home: Path | None = None) -> None:
        self.device = device
        self._ledger = ledger
        self._home = home
        self._environments: dict[tuple[Role, str], Mapping[str, str]] = {}

    def environment(self, contender: Contender) -> Mapping[str, str]:
        """What evidence about a backend depends on, as it is now."""
        key = contender.part.role, contender.backend
        if key not in self._environments:
            self._environments[key] = environment.current(self.device, *key, self._home)
        return self._environments[key]

    def source(self, contender: Contender) -> str:
        """The hash of a backend's source; empty for one whose files cannot be found."""
        try:
            return environment.source_hash(contender.part.role, contender.backend)
        except UsageError:
            return ""

    def counting(self, contender: Contender) -> dict[str, Evidence]:
        """The evidence that counts for a backend on a part, by case: the newest, or a failure that stays.

        A case that was not tried is as good as unknown.
        """
        found: dict[str, Evidence] = {}
        now, source = self.environment(contender), self.source(contender)
        rows = self._ledger.evidence(part=contender.part.key, backend=contender.backend)
        for evidence in sorted(rows, key=lambda row: row.date):
            before = found.get(evidence.case)
            stays = before is not None and before.verdict.failed and before.verdict not in _OF_THE_MOMENT
            says_nothing = evidence.verdict is Verdict.NOT_TRIED or self._ledger.counts(evidence, now, source)
            if not stays and not says_nothing:
                found[evidence.case] = evidence
        return found

    def of(self, contender: Contender, cases: Mapping[int, Sequence[Case]]) -> tuple[Standing, ...]:
        """How a backend stands in each token bucket, given the cases that are asked of it there."""
        counting = () if contender.refusal is not None else self.counting(contender).values()
        return stand(contender, cases, counting)


def stand(
    contender: Contender, cases: Mapping[int, Sequence[Case]], evidence: Iterable[Evidence]
) -> tuple[Standing, ...]:
    """How a backend stands in each token bucket by the light of this evidence about it and its part."""
    rows = tuple(evidence)
    return tuple(_standing(contender, tokens, asked, rows) for tokens, asked in cases.items())


def _standing(contender: Contender, tokens: int, asked: Sequence[Case], counting: Iterable[Evidence]) -> Standing:
    """A case that the backend itself declines, such as ids of experts elsewhere, is not asked of it."""
    if contender.refusal is not None:
        return Standing(contender, tokens, contender.refusal)
    if not contender.meant_for(tokens):
        return Standing(contender, tokens, Verdict.NOT_TRIED)
    cases = {case.to_json() for case in asked}
    evidence = sorted((row for row in counting if row.tokens == tokens or row.case in cases), key=_ease)
    settled = {(row.tokens, row.pattern) for row in evidence if row.verdict in _ANSWERS}
    missing = tuple(dict.fromkeys(case.pattern for case in asked if (case.tokens, case.pattern) not in settled))
    failure = next((row.verdict for row in evidence if row.verdict.failed), None)
    proven = any(row.verdict is Verdict.PROVEN and row.tokens == tokens for row in evidence) and not missing
    verdict = failure or (Verdict.PROVEN if proven else Verdict.NOT_TRIED)
    return Standing(contender, tokens, verdict, tuple(evidence), missing)


def _ease(evidence: Evidence) -> tuple[bool, float]:
    """Failures first, then what came closest to a limit."""
    return not evidence.verdict.failed, -share_of_limit(evidence)


def closest(evidence: Evidence) -> tuple[float, float] | None:
    """The distance that came closest to its limit, and that limit; None where there was nothing to compare."""
    errors = evidence.errors
    if errors is None or errors.whole is None or errors.worst_token is None:
        return None
    pairs = ((errors.whole, errors.limit_whole), (errors.worst_token, errors.limit_worst_token))
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def share_of_limit(evidence: Evidence) -> float:
    """The distance that came closest to its limit, as a share of that; 0 where there was nothing to compare."""
    pair = closest(evidence)
    return 0.0 if pair is None else pair[0] / pair[1]


def spans(standings: Iterable[Standing]) -> Iterator[tuple[str, tuple[Standing, ...]]]:
    """Neighbouring token buckets of one backend with the same answer, under a name such as "1-64"."""
    for _, group in groupby(standings, key=lambda one: (one.contender, one.verdict, one.why)):
        same = tuple(group)
        first, last = same[0].tokens, same[-1].tokens
        yield (str(first) if first == last else f"{first}-{last}"), same


def shortfalls(standings: Sequence[Standing], *, by_name: bool) -> tuple[UnprovenError, ...]:
    """What is not proven and should be.

    Args:
        standings: of backends on parts, those of one backend and part together.
        by_name: the user named the backends, so each must be proven wherever it is meant to run; otherwise something
            must be, for every part and token bucket.
    """
    if by_name:
        asked = [one for one in standings if one.asked]
        return tuple(_shortfall(span, same[0]) for span, same in spans(asked) if same[0].verdict is not Verdict.PROVEN)
    proven = {(one.contender.part, one.tokens) for one in standings if one.verdict is Verdict.PROVEN}
    gaps: dict[Part, list[Standing]] = {}
    for one in standings:
        if (one.contender.part, one.tokens) not in proven:
            gaps.setdefault(one.contender.part, []).append(one)
    return tuple(_gap(part, bare) for part, bare in gaps.items())


def _gap(part: Part, bare: Sequence[Standing]) -> UnprovenError:
    counts = ", ".join(str(count) for count in dict.fromkeys(one.tokens for one in bare))
    reasons = [_shortfall(span, same[0]) for span, same in spans(bare)]
    return UnprovenError(f"{part.key} at {units.tokens(counts)}", found="no proven backend", reasons=reasons)


def _shortfall(span: str, standing: Standing) -> UnprovenError:
    return UnprovenError(
        f"{standing.contender.backend} at {units.tokens(span)} of {standing.contender.part.key}",
        found=f"{standing.verdict.value}, {standing.why}",
        expected="proven",
    )


def title(part: Part) -> str:
    """A part as a heading."""
    others = f" and {part.uses - 1} more" if part.uses > 1 else ""
    return f"{part.key}: {part.module}{others}"
