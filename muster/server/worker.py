"""The one thread that owns the engine: requests in, pieces of answers out, one step after the other."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from muster.engine.engine import Engine
from muster.engine.request import Request
from muster.errors import MusterError, NumericsError, RequestError
from muster.llm import LLM
from muster.server.health import Health, Phase
from muster.server.mailbox import Cursor, Mailbox, Piece
from muster.server.metrics import Metrics
from muster.server.refusal import RefusalError

_Order = Callable[[Engine], None]


@dataclass(eq=False)
class Job:
    """What one client waits for: the answers to its prompts.

    Attributes:
        requests: of the engine; an answer's index is its place here.
        mailbox: where their pieces go.
        arrived: when it came, in seconds of `time.perf_counter`.
    """

    requests: Sequence[Request]
    mailbox: Mailbox
    arrived: float = field(default_factory=time.perf_counter)


class Worker:
    """Runs an engine in a thread of its own. Its methods are for the event loop's thread.

    Args:
        load: makes the model, in the worker's thread.
        health: told when the model is ready, and of NaN and failures.
        metrics: told of tokens and times.
        most: requests that may be alive at once, in the batch and in the queue.
        failed: called in the event loop when the thread has ended by an exception.

    Attributes:
        llm: the model, None until it is loaded.
        step_began: when the step that runs now began, in seconds of `time.monotonic`; None between steps.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        health: Health,
        metrics: Metrics,
        *,
        most: int,
        failed: Callable[[BaseException], None],
    ) -> None:
        self.llm: LLM | None = None
        self.step_began: float | None = None
        self._load, self._health, self._metrics, self._failed = load, health, metrics, failed
        self._most = most
        self._orders: queue.SimpleQueue[_Order] = queue.SimpleQueue()
        self._open: set[Job] = set()
        self._cursors: dict[Request, tuple[Job, Cursor]] = {}
        self._stopped = False
        self._loop: asyncio.AbstractEventLoop | None = None
        # A step that hangs must not keep the process alive.
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Loads the model and begins to serve; returns at once."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def alive(self) -> int:
        """Requests whose answers have not ended."""
        return sum(len(job.requests) for job in self._open)

    def submit(self, requests: Sequence[Request]) -> Job:
        """Puts requests into the queue.

        Raises:
            RequestError: more than there is ever room for.
            RefusalError: there is no room, or the server serves nobody now.
        """
        if not self._health.accepting:
            raise unavailable(self._health)
        if len(requests) > self._most:
            raise RequestError("answers", found=f"{len(requests)}", expected=f"at most {self._most} at once")
        if self.alive + len(requests) > self._most:
            raise RefusalError(
                429,
                "queue_full",
                "queue",
                found=f"{self.alive} requests ahead, {len(requests)} more",
                expected=f"at most {self._most} at once",
                hint="try again later",
                retry_after=1,
            )
        job = Job(requests, Mailbox())
        self._open.add(job)
        self._orders.put(lambda engine: self._add(engine, job))
        return job

    def cancel(self, job: Job) -> None:
        """Nobody waits for it any more: it leaves the engine, and its pages are free, before the next step."""
        if job in self._open:
            self._orders.put(lambda engine: self._abort(engine, job))

    def abort_all(self, failure: MusterError) -> None:
        """Ends every answer with this failure."""
        for job in self._open:
            job.mailbox.fail(failure)
            self.cancel(job)

    def stop(self, seconds: float) -> bool:
        """Ends the thread after its step; whether it did within that time."""
        self._orders.put(self._stop)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self.llm = self._load()
            self._metrics.watch(self.llm.engine, self.llm.decoder.plan)
            self._health.passed()
            while not self._stopped:
                self._obey(self.llm.engine)
                self._step(self.llm.engine)
        except BaseException as error:
            failure = error
            self._tell(lambda: self._failed(failure))

    def _obey(self, engine: Engine) -> None:
        """Carries out every order there is; with nothing to compute, waits for one."""
        try:
            self._orders.get(block=engine.idle)(engine)
            while True:
                self._orders.get(block=False)(engine)
        except queue.Empty:
            pass

    def _step(self, engine: Engine) -> None:
        if engine.idle:
            return
        self.step_began = time.monotonic()
        advanced = engine.step()
        self.step_began = None
        if engine.last_step is not None:
            self._metrics.observe_step(len(engine.last_step.rows))
        now = time.perf_counter()
        news = [(job, self._news(job, cursor, now)) for job, cursor in map(self._cursors.__getitem__, advanced)]
        if news:
            self._tell(lambda: self._deliver(news))

    def _news(self, job: Job, cursor: Cursor, now: float) -> Piece:
        """What a request got in a step that ended now."""
        piece = cursor.piece()
        if cursor.last is None:
            self._metrics.observe_first(now - job.arrived)
        elif piece.token_ids:
            self._metrics.observe_later(now - cursor.last, len(piece.token_ids))
        cursor.last = now
        if piece.output is not None:
            self._metrics.observe_end(piece.output.finish_reason)
            del self._cursors[cursor.request]
        if isinstance(piece.failure, NumericsError):
            self._health.fault("nan", str(piece.failure).splitlines()[0])
        return piece

    def _add(self, engine: Engine, job: Job) -> None:
        for index, request in enumerate(job.requests):
            self._cursors[request] = (job, Cursor(request, index))
            engine.add(request)

    def _abort(self, engine: Engine, job: Job) -> None:
        for request in job.requests:
            engine.abort(request)
            if self._cursors.pop(request, None) is not None:
                self._metrics.observe_end("abort")
        self._tell(lambda: self._open.discard(job))

    def _stop(self, _: Engine) -> None:
        self._stopped = True

    def _tell(self, what: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(what)
        except RuntimeError:
            if not self._loop.is_closed():
                raise

    def _deliver(self, news: Sequence[tuple[Job, Piece]]) -> None:
        for job, piece in news:
            job.mailbox.put(piece)
            if all(request.finish_reason is not None for request in job.requests):
                self._open.discard(job)


def unavailable(health: Health) -> RefusalError:
    """Why nobody is served now."""
    retry = 5 if health.phase is Phase.LOADING else None
    return RefusalError(
        503, "not_ready", "server", found="; ".join(health.reasons), expected="ready", retry_after=retry
    )
