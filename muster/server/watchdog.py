"""Notices a step that does not end."""

from __future__ import annotations

import asyncio
import faulthandler
import sys
import time
from collections.abc import Callable

from muster.errors import MusterError
from muster.server.health import Health
from muster.server.logs import log
from muster.server.worker import Worker

_FROZEN = 3
"""Limits after which an interpreter that runs no Python at all, not even this, is ended by another thread of C."""


class HungError(MusterError):
    """A step does not end."""


class Watchdog:
    """Takes readiness away from a server whose step takes longer than `limit` seconds, and gives up after twice that.

    Args:
        worker: whose steps.
        health: loses readiness, and gets it back if the step ends after all.
        limit: seconds that a step may take.
        fail: called when there is no hope.
    """

    def __init__(self, worker: Worker, health: Health, limit: float, fail: Callable[[BaseException], None]) -> None:
        self._worker, self._health, self._limit, self._fail = worker, health, limit, fail
        self._hung = False

    async def watch(self) -> None:
        """Looks at the worker until it is given up."""
        while True:
            faulthandler.dump_traceback_later(_FROZEN * self._limit + 1, exit=True, file=sys.__stderr__ or sys.stderr)
            await asyncio.sleep(min(1.0, self._limit / 8))
            began = self._worker.step_began
            seconds = 0.0 if began is None else time.monotonic() - began
            if seconds > 2 * self._limit:
                self._fail(self._error(seconds))
                return
            if (seconds > self._limit) != self._hung:
                self._hung = not self._hung
                self._tell(seconds)

    def stop(self) -> None:
        """Nothing is watched any more."""
        faulthandler.cancel_dump_traceback_later()

    def _tell(self, seconds: float) -> None:
        if self._hung:
            self._health.fault("hang", str(self._error(seconds)))
            log("hang", seconds=round(seconds, 1))
        else:
            self._health.recovered("hang")
            log("recovered")

    def _error(self, seconds: float) -> HungError:
        step = self._worker.llm.engine.last_step if self._worker.llm is not None else None
        thing = "step" if step is None else f"step {step.number} of {step.tokens} tokens"
        return HungError(thing, found=f"{seconds:.1f} s and no end", expected=f"at most {self._limit:g} s")
