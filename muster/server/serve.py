"""`muster serve`: listen, load, serve, drain."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import uvicorn

from muster import env
from muster.errors import INTERRUPTED, MusterError, UsageError
from muster.llm import LLM
from muster.server.app import application
from muster.server.crash import write_report
from muster.server.health import Health, Phase
from muster.server.logs import log
from muster.server.metrics import Metrics
from muster.server.refusal import RefusalError
from muster.server.service import Service, Settings
from muster.server.watchdog import Watchdog
from muster.server.worker import Worker

_KEEP_ALIVE = 75
"""Seconds that a connection may wait for its next request."""
_LAST_WORDS = 2
"""Seconds that answers have to leave the process before it ends."""


def command(
    model: Path,
    *,
    host: str,
    port: int,
    settings: Settings,
    drain: float,
    watchdog: float,
    options: dict[str, Any],
) -> NoReturn:
    """Serves until a signal or a failure ends it, and the process with it: 0 drained, 1 failed or cut, 130 by SIGINT.

    Args:
        model: the checkpoint.
        host: address to listen at.
        port: to listen at; 0 takes any that is free.
        settings: of the service.
        drain: seconds that requests have to end after the first signal.
        watchdog: seconds that a step may take.
        options: of `LLM`.

    Raises:
        UsageError: nobody can listen there.
        MusterError: the model cannot be loaded or does not compute right.
    """
    home = env.read().home
    listening = _listen(host, port)
    health = Health()
    metrics = Metrics(health)
    serving = Serving(health, home, drain)
    most = options["max_batch"] + settings.queue
    worker = Worker(lambda: LLM(model, **options), health, metrics, most=most, failed=serving.fail)
    code = serving.run(Service(settings, worker, health, metrics), listening, watchdog)
    sys.stdout.flush()
    sys.stderr.flush()
    # A step that hangs would keep the interpreter from ending.
    os._exit(code)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        found = f"{host} port {port}: {error.strerror or error}"
        raise UsageError(
            "--host and --port", found=found, expected="an address of this machine and a free port"
        ) from error


class Serving:
    """A listening server around a service. The first signal drains it, a second ends it at once."""

    def __init__(self, health: Health, home: Path, drain: float) -> None:
        self._health, self._home, self._seconds = health, home, drain
        self._failure: BaseException | None = None
        self._first_signal: int | None = None
        self._cut = 0
        self._tasks: list[asyncio.Task[None]] = []

    def run(self, service: Service, listening: socket.socket, watchdog: float) -> int:
        """Serves until the end; the exit code.

        Raises:
            MusterError: the model cannot be loaded or does not compute right.
        """
        self._service = service
        self._watchdog = Watchdog(service.worker, self._health, watchdog, self.fail)
        config = uvicorn.Config(
            application(service),
            log_config=None,
            access_log=False,
            server_header=False,
            lifespan="off",
            timeout_keep_alive=_KEEP_ALIVE,
            timeout_graceful_shutdown=_LAST_WORDS,
        )
        self._server = _Uvicorn(config, signalled=self._signalled, started=lambda: self._started(listening))
        self._server.run(sockets=[listening])
        self._watchdog.stop()
        if isinstance(self._failure, MusterError) and service.worker.llm is None:
            raise self._failure
        if self._failure is not None or self._cut:
            return 1
        return INTERRUPTED if self._first_signal == signal.SIGINT else 0

    def fail(self, failure: BaseException) -> None:
        """The engine has failed: nothing can be computed any more."""
        self._failure = failure
        self._health.fault("fatal", f"{type(failure).__name__}: {failure}".splitlines()[0])
        worker = self._service.worker
        if worker.llm is not None or not isinstance(failure, MusterError):
            self._report(failure)
        worker.abort_all(RefusalError(500, "engine_failed", "engine", found="a failure", expected="it to compute"))
        self._server.should_exit = True

    def _report(self, failure: BaseException) -> None:
        try:
            path = write_report(self._home, failure, self._service.worker.llm)
        except OSError as error:
            log("fatal", error=f"{type(failure).__name__}: {failure}", report=f"not written: {error}")
        else:
            log("fatal", error=f"{type(failure).__name__}: {failure}", report=str(path))

    def _started(self, listening: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        host, port = listening.getsockname()[:2]
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        log("listening", url=url, model=self._service.settings.name, pid=os.getpid())
        settings = self._service.settings
        if not settings.loopback and not settings.keys:
            log("warning", text="anybody who reaches this address can use the server; --api-key-file asks for a key")
        self._service.worker.start()
        self._tasks.append(self._loop.create_task(self._watchdog.watch()))

    def _signalled(self, number: int) -> None:
        if self._first_signal is not None or self._health.phase is Phase.LOADING:
            os._exit(INTERRUPTED)
        self._first_signal = number
        self._health.phase = Phase.DRAINING
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(self._drain())))

    async def _drain(self) -> None:
        """Waits for the answers that are on their way, ends those that take too long, then the server."""
        worker = self._service.worker
        log("draining", alive=worker.alive, seconds=self._seconds)
        end = self._loop.time() + self._seconds
        while (worker.alive or self._server.server_state.tasks) and self._loop.time() < end:
            await asyncio.sleep(0.02)
        self._cut = worker.alive
        worker.abort_all(
            RefusalError(503, "shutting_down", "server", found="a shutdown", expected="another one to answer")
        )
        await asyncio.to_thread(worker.stop, _LAST_WORDS)
        log("drained", cut=self._cut)
        self._server.should_exit = True


class _Uvicorn(uvicorn.Server):
    """uvicorn that leaves signals to its owner and tells it when it listens."""

    def __init__(
        self, config: uvicorn.Config, *, signalled: Callable[[int], None], started: Callable[[], None]
    ) -> None:
        super().__init__(config)
        self._signalled, self._tell_started = signalled, started

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell_started()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._signalled(sig)
