"""One rate: every request is sent when it is due, whether the server keeps up or not."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

from muster.lab.load.client import Client
from muster.lab.load.lag import Lag
from muster.lab.load.lengths import Pair
from muster.lab.load.outcome import Failure, Kind, Outcome, RequestFailedError


@dataclass(frozen=True)
class Request:
    """What is to be asked, and when.

    Attributes:
        number: counts from 0.
        prompt: the text.
        asked: its lengths in tokens.
        due: seconds of the stage's clock.
    """

    number: int
    prompt: str
    asked: Pair
    due: float


@dataclass
class Stage:
    """What has become of the requests at one rate so far.

    Attributes:
        rate: requests per second that are due.
        window: seconds in which requests are due.
        sent: requests that have left.
        outcomes: of those that have ended, in the order in which they did.
        lag: of this process.
        interrupted: whether the user stopped it.
    """

    rate: float
    window: float
    sent: int = 0
    outcomes: list[Outcome] = field(default_factory=list)
    lag: Lag = field(default_factory=Lag)
    interrupted: bool = False

    @property
    def seconds(self) -> float:
        """From the first due time to the last end, and no less than the window unless that was cut short."""
        ends = [outcome.ended for outcome in self.outcomes]
        return max(ends, default=0.0) if self.interrupted else max([self.window, *ends])

    async def run(self, client: Client, requests: Iterator[Request], *, timeout: float) -> None:
        """Sends the requests and waits for all of them; those that an interrupt ends are told as such.

        Args:
            client: of the server.
            requests: in the order in which they are due.
            timeout: seconds after its due time at which a request has failed.
        """
        tasks: list[asyncio.Task[None]] = []
        # Preparing the first prompt must not make it late.
        first = next(requests, None)
        start = time.monotonic()
        try:
            async with self.lag.watched():
                for request in itertools.chain((first,) if first else (), requests):
                    await asyncio.sleep(max(0.0, start + request.due - time.monotonic()))
                    tasks.append(asyncio.create_task(self._ask(client, request, start, timeout)))
                    await asyncio.sleep(0)  # it leaves before the next prompt is written
                await asyncio.gather(*tasks)
        except asyncio.CancelledError:
            self.interrupted = True
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _ask(self, client: Client, request: Request, start: float, timeout: float) -> None:
        sent = time.monotonic() - start
        self.sent += 1
        self.lag.seconds.append(sent - request.due)
        answer, failure = None, None
        try:
            async with asyncio.timeout_at(start + request.due + timeout):
                answer = await client.complete(request.prompt, request.asked.answer, since=start)
        except RequestFailedError as error:
            failure = error.failure
        except TimeoutError:
            failure = Failure(Kind.TIMEOUT, f"no end after {timeout:g} s")
        except asyncio.CancelledError:
            failure = Failure(Kind.INTERRUPTED)
        ended = time.monotonic() - start
        self.outcomes.append(Outcome(request.number, request.asked, request.due, sent, ended, answer, failure))
