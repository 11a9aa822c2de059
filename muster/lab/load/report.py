"""What a run of several rates came to: tables, one document, a chart."""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from muster.errors import INTERRUPTED, MusterError
from muster.lab import units
from muster.lab.load.figures import Figures, Spread
from muster.lab.load.objective import ENOUGH, Objective
from muster.lab.load.outcome import Outcome
from muster.lab.load.stage import Stage
from muster.lab.table import Column, Section, Table

if TYPE_CHECKING:
    from muster.lab.plot import Chart

_THROUGHPUT = (
    Column("requests/s", right=True),
    Column("sent", right=True),
    Column("completed", right=True),
    Column("failed", right=True),
    Column("prompt", right=True),
    Column("answer", right=True),
    Column("tok/s in", right=True),
    Column("tok/s out", right=True),
    Column("within SLO", right=True),
    Column("goodput", right=True),
)
_LATENCY = (Column("requests/s", right=True), *(Column(name, right=True) for name in ("p50", "p90", "p99", "max")))
_FAILURES = (Column("requests/s", right=True), Column("failed", right=True), Column("why"))
_METRICS: Mapping[str, str] = MappingProxyType(
    {"ttft": "time to first token", "tbt": "time between tokens", "e2e": "time to the end of the answer"}
)
_ROW = (
    "rate",
    "number",
    "result",
    "due_s",
    "sent_s",
    "ended_s",
    "asked_prompt_tokens",
    "asked_answer_tokens",
    "prompt_tokens",
    "answer_tokens",
    "ttft_s",
    "tbt_mean_s",
    "tbt_max_s",
    "e2e_s",
    "met",
    "message",
)
_OFF = 0.1
"""Part by which prompts may miss their length before it is said."""


@dataclass(frozen=True)
class Report:
    """Stages that are over, and what was asked of them.

    Attributes:
        setting: what all stages share, for people and programs.
        objective: what requests should meet.
        stages: in the order in which they ran.
        interrupted: whether the user stopped the run.
    """

    setting: Mapping[str, Any]
    objective: Objective
    stages: Sequence[Stage]
    interrupted: bool

    @property
    def figures(self) -> list[Figures]:
        """One rate each."""
        return [Figures.of(stage, self.objective) for stage in self.stages]

    def tables(self) -> Iterator[Table]:
        """Throughput, latencies, and failures where there are any."""
        figures = self.figures
        title = "{model} at {server}: {arrivals} arrivals, {lengths} lengths".format(**self.setting)
        yield Table(_THROUGHPUT, [Section(title, [_throughput(one) for one in figures])])
        yield Table(
            _LATENCY,
            [
                Section(title, [_latency(one.rate, getattr(one, name)) for one in figures])
                for name, title in _METRICS.items()
            ],
        )
        failures = [(f"{one.rate:g}", str(count), why) for one in figures for why, count in one.failures.items()]
        if failures:
            yield Table(_FAILURES, [Section("failures", failures)])

    def verdict(self) -> str:
        """Which rate meets the objective, as a sentence; empty where there is none to meet."""
        limits = ", ".join(f"{name} <= {units.time(limit)}" for name, limit in self.objective.limits.items())
        if not limits:
            return ""
        best = self._best(self.figures)
        found = "no rate here" if best is None else f"{best:g} requests/s is the highest rate here"
        return f"{found} at which {ENOUGH:.0%} of requests meet {limits}"

    def document(self) -> dict[str, Any]:
        """Everything, for `--json`; times in seconds."""
        figures = self.figures
        return {
            **self.setting,
            "slo": self.objective.limits,
            "rates": [one.document() for one in figures],
            "highest_rate_within_slo": self._best(figures),
            "interrupted": self.interrupted,
        }

    def csv(self) -> str:
        """A row per request, and a first one of names."""
        stream = io.StringIO(newline="")
        rows = csv.writer(stream, lineterminator="\n")
        rows.writerow(_ROW)
        for stage in self.stages:
            for outcome in sorted(stage.outcomes, key=lambda one: one.number):
                rows.writerow(self._row(stage.rate, outcome))
        return stream.getvalue()

    def chart(self) -> Chart:
        """Latencies over the rate, each beside its limit."""
        from muster.lab.plot import Chart, Curve, Panel

        panels = []
        for name, title in _METRICS.items():
            spreads = {one.rate: spread for one in self.figures if (spread := getattr(one, name)) is not None}
            curves = [
                Curve(share, {rate: getattr(spread, share) for rate, spread in spreads.items()})
                for share in ("p50", "p90", "p99")
            ]
            limit = self.objective.limits.get(name)
            if limit is not None:
                curves.append(Curve("limit", dict.fromkeys(spreads, limit), reference=True))
            panels.append(Panel(title, "time", curves, x="requests/s"))
        note = "{arrivals} arrivals, {lengths} lengths; latencies count from the time a request was due"
        return Chart("{model} at {server}".format(**self.setting), [panels], note.format(**self.setting))

    def notes(self) -> Iterator[str]:
        """What a reader of the numbers must know."""
        for one in self.figures:
            at = f"at {one.rate:g} requests/s"
            if one.coarse and one.lag is not None:
                yield (
                    f"warning: {at} this client itself was late by {units.time(one.lag.p99)} (p99, at most "
                    f"{units.time(one.lag.max)}): latencies are that much too long; give it a core, or a lower rate"
                )
            if abs(one.prompt_tokens - one.asked_prompt_tokens) > _OFF * one.asked_prompt_tokens:
                yield f"{at} prompts had {one.prompt_tokens} tokens, not {one.asked_prompt_tokens} as asked for"
            if one.short:
                yield f"{at} {one.short} of {one.completed} answers ended early: the server does not heed ignore_eos"

    def conclude(self) -> None:
        """Raises what the exit code says.

        Raises:
            SystemExit: the user interrupted it.
            MusterError: no request was completed.
        """
        if self.interrupted:
            sys.stderr.write("interrupted; this is what was finished\n")
            raise SystemExit(INTERRUPTED)
        figures = self.figures
        if not any(one.completed for one in figures):
            sent = sum(one.sent for one in figures)
            reasons = dict.fromkeys(why for one in figures for why in one.failures)
            found = f"none of {sent} completed: {'; '.join(reasons)}"
            raise MusterError("requests", found=found, expected="at least one that completes")

    def _best(self, figures: Sequence[Figures]) -> float | None:
        met = (one.rate for one in figures if one.share is not None and one.share >= ENOUGH and not one.interrupted)
        return max(met, default=None)

    def _row(self, rate: float, one: Outcome) -> list[Any]:
        answer = one.answer
        gaps = list(answer.gaps()) if answer else []
        times = {
            "due_s": one.due,
            "sent_s": one.sent,
            "ended_s": one.ended,
            "ttft_s": one.first_token,
            "tbt_mean_s": sum(gaps) / len(gaps) if gaps else None,
            "tbt_max_s": max(gaps, default=None),
            "e2e_s": one.whole,
        }
        cells = {
            **{name: None if seconds is None else f"{seconds:.6f}" for name, seconds in times.items()},
            "rate": f"{rate:g}",
            "number": one.number,
            "result": one.result,
            "asked_prompt_tokens": one.asked.prompt,
            "asked_answer_tokens": one.asked.answer,
            "prompt_tokens": answer.prompt_tokens if answer else None,
            "answer_tokens": answer.tokens if answer else None,
            "met": int(self.objective.met_by(one)) if self.objective.limits else None,
            "message": str(one.failure) if one.failure else None,
        }
        return [cells[name] for name in _ROW]


def write_whole(path: Path, text: str) -> None:
    """Writes a file whole or not at all."""
    partial = path.with_name(f".{path.name}")
    partial.write_text(text, encoding="utf-8")
    partial.replace(path)


def _throughput(one: Figures) -> tuple[str, ...]:
    mean = [tokens / one.completed if one.completed else None for tokens in (one.prompt_tokens, one.answer_tokens)]
    return (
        f"{one.rate:g}",
        str(one.sent),
        str(one.completed),
        str(one.sent - one.completed),
        *("" if tokens is None else f"{tokens:.0f}" for tokens in mean),
        f"{one.per_second(one.prompt_tokens):.0f}",
        f"{one.per_second(one.answer_tokens):.0f}",
        "" if one.share is None else f"{one.share:.0%}",
        "" if one.met is None else f"{one.per_second(one.met):.2f}",
    )


def _latency(rate: float, spread: Spread | None) -> tuple[str, ...]:
    if spread is None:
        return (f"{rate:g}", "", "", "", "")
    return (f"{rate:g}", *(units.time(each) for each in (spread.p50, spread.p90, spread.p99, spread.max)))
