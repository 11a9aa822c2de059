"""How late this process itself is: what it measures of a server cannot be finer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

_BEAT = 0.02
"""Seconds between two looks."""


class Lag:
    """Seconds by which the event loop came late to what was due, request by request and beat by beat."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    @asynccontextmanager
    async def watched(self) -> AsyncIterator[None]:
        """Looks at the clock all the while."""
        beating = asyncio.create_task(self._beat())
        try:
            yield
        finally:
            beating.cancel()

    async def _beat(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _BEAT
            await asyncio.sleep(_BEAT)
            self.seconds.append(loop.time() - due)
