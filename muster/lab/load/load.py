"""`muster bench --server`: gauge the server's tokens, warm it up, then one rate after the other."""

from __future__ import annotations

import asyncio
import itertools
import json as jsonlib
import secrets
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import MusterError
from muster.lab.load.arrivals import Arrivals
from muster.lab.load.client import Client
from muster.lab.load.lengths import Lengths, Pair
from muster.lab.load.objective import Objective
from muster.lab.load.outcome import RequestFailedError
from muster.lab.load.prompts import Gauge, Prompts, probe
from muster.lab.load.report import Report, write_whole
from muster.lab.load.stage import Request, Stage
from muster.lab.screen import Screen, screen

_REDRAW = 0.25
"""Seconds between two pictures of a running stage on a terminal."""
_LINE = 10.0
"""Seconds between two lines about it elsewhere."""


@dataclass(frozen=True)
class Load:
    """What a server is to bear.

    Attributes:
        server: its URL, without `/v1`.
        model: its name there; None: the only one.
        key: for servers that ask for one.
        rates: requests per second, one after the other.
        arrivals: when requests are due.
        lengths: of prompts and answers.
        named: the lengths, for people.
        count: requests per rate; None: as many as are due in `seconds`.
        seconds: in which requests are due, per rate; None: as long as `count` takes.
        seed: of arrivals and lengths, the same at every rate.
        shared: tokens that all prompts begin with.
        warm_up: requests at once before the first rate, not counted.
        timeout: seconds after its due time at which a request has failed.
        objective: what requests should meet.
    """

    server: str
    model: str | None
    key: str | None
    rates: tuple[float, ...]
    arrivals: Arrivals
    lengths: Lengths
    named: str
    count: int | None
    seconds: float | None
    seed: int
    shared: int
    warm_up: int
    timeout: float
    objective: Objective

    def requests(self, prompts: Prompts, rate: float) -> Iterator[Request]:
        """Those of one rate, in the order in which they are due."""
        due = self.arrivals.times(rate, self.seed)
        if self.seconds is not None:
            seconds = self.seconds
            due = itertools.takewhile(lambda at: at < seconds, due)
        for number, (at, pair) in enumerate(zip(itertools.islice(due, self.count), self.pairs(), strict=False)):
            yield self._request(prompts, f"{rate:g} {number}", number, pair, at)

    def first(self, prompts: Prompts) -> Iterator[Request]:
        """Those of the warm-up, all due at once."""
        for number, pair in enumerate(itertools.islice(self.pairs(), self.warm_up)):
            yield self._request(prompts, f"warm-up {number}", number, pair, 0.0)

    def pairs(self) -> Iterator[Pair]:
        """Lengths without what prompts share."""
        return self.lengths.pairs(self.seed)

    def window(self, rate: float) -> float:
        """Seconds in which the requests of a rate are due."""
        return self.seconds if self.count is None and self.seconds is not None else (self.count or 0) / rate

    def _request(self, prompts: Prompts, name: str, number: int, pair: Pair, due: float) -> Request:
        return Request(number, prompts.text(name, pair.prompt), Pair(self.shared + pair.prompt, pair.answer), due)


class Run:
    """A load as far as it has been borne.

    Args:
        load: what is asked.
        view: where it shows itself.
    """

    def __init__(self, load: Load, view: Screen) -> None:
        self._load, self._view = load, view
        self._setting: dict[str, Any] = {
            "server": load.server,
            "model": load.model or "?",
            "arrivals": load.arrivals.name,
            "variation": load.arrivals.variation,
            "lengths": load.named,
            "shared_prefix": load.shared,
            "seed": load.seed,
            "warm_up": load.warm_up,
            "timeout": load.timeout,
        }
        self._stages: list[Stage] = []
        self._interrupted = False

    def run(self) -> Report:
        """Bears it to the end or until the user interrupts it.

        Raises:
            EnvironmentLackError: httpx is not installed.
            MusterError: the server is not there, or does not count tokens.
        """
        try:
            asyncio.run(self._run())
        except KeyboardInterrupt:
            self._interrupted = True
        return self._report()

    async def _run(self) -> None:
        load = self._load
        async with Client.open(load.server, model=load.model, key=load.key) as client:
            self._setting["model"] = client.model
            nonce = secrets.token_hex(8)
            gauge = await _gauge(client, nonce, load.timeout)
            self._setting["tokens_per_word"] = gauge.per_word
            prompts = Prompts(gauge, load.shared, nonce)
            if load.warm_up:
                await self._warm_up(client, prompts)
            for rate in load.rates:
                if self._interrupted:
                    return
                stage = Stage(rate, load.window(rate))
                self._stages.append(stage)
                await self._bear(stage, client, load.requests(prompts, rate))

    async def _warm_up(self, client: Client, prompts: Prompts) -> None:
        stage = Stage(rate=0.0, window=0.0)
        await self._bear(stage, client, self._load.first(prompts))

    async def _bear(self, stage: Stage, client: Client, requests: Iterator[Request]) -> None:
        async with self._shown(stage):
            await stage.run(client, requests, timeout=self._load.timeout)
        self._interrupted = stage.interrupted
        self._view.line(_status(stage))

    @asynccontextmanager
    async def _shown(self, stage: Stage) -> AsyncIterator[None]:
        showing = [asyncio.create_task(self._draw(stage)), asyncio.create_task(self._tell(stage))]
        try:
            yield
        finally:
            for task in showing:
                task.cancel()

    async def _draw(self, stage: Stage) -> None:
        finished = next(self._report(self._stages[:-1]).tables())
        while True:
            self._view.draw(lambda: finished, _status(stage))
            await asyncio.sleep(_REDRAW)

    async def _tell(self, stage: Stage) -> None:
        while True:
            await asyncio.sleep(_LINE)
            self._view.line(_status(stage))

    def _report(self, stages: list[Stage] | None = None) -> Report:
        shown = self._stages if stages is None else stages
        return Report(self._setting, self._load.objective, shown, self._interrupted)


def command(load: Load, *, csv: Path | None, plot: Path | None, json: bool) -> None:
    """Bears it, then prints what it came to.

    Args:
        load: what is asked.
        csv: where to write a row per request.
        plot: where to draw latencies.
        json: print one document instead of tables.

    Raises:
        EnvironmentLackError, MusterError: as `Run.run` and `Report.conclude`.
        SystemExit: the user interrupted it.
    """
    with screen() as view:
        report = Run(load, view).run()
    if json:
        sys.stdout.write(jsonlib.dumps(report.document(), indent=2) + "\n")
    else:
        _write(report)
    for note in report.notes():
        sys.stderr.write(f"{note}\n")
    if csv is not None:
        write_whole(csv, report.csv())
    if plot is not None:
        report.chart().save(plot)
    report.conclude()


async def _gauge(client: Client, nonce: str, timeout: float) -> Gauge:
    """What a word is in tokens, by the server's own count of two prompts."""
    try:
        async with asyncio.timeout(timeout):
            once, twice = [(await client.complete(probe(times, nonce), 1)).prompt_tokens for times in (1, 2)]
    except RequestFailedError as error:
        raise MusterError(f"a first request to {client.model}", found=str(error), expected="an answer") from error
    except TimeoutError:
        found = f"nothing after {timeout:g} s"
        raise MusterError(f"a first request to {client.model}", found=found, expected="an answer") from None
    if twice <= once:
        found = f"{once} tokens for a prompt and {twice} for one twice as long"
        raise MusterError("usage.prompt_tokens", found=found, expected="a count of the prompt's tokens")
    return Gauge.of(once, twice)


def _write(report: Report) -> None:
    for number, table in enumerate(report.tables()):
        sys.stdout.write("\n" if number else "")
        sys.stdout.flush()
        table.write()
    if verdict := report.verdict():
        sys.stdout.write(f"\n{verdict}\n")


def _status(stage: Stage) -> str:
    name = f"{stage.rate:g} requests/s" if stage.rate else "warm-up"
    completed = sum(one.failure is None for one in stage.outcomes)
    failed = len(stage.outcomes) - completed
    waiting = stage.sent - len(stage.outcomes)
    return f"{name}: {stage.sent} sent, {completed} completed, {failed} failed, {waiting} under way"
