"""Answers over HTTP: one JSON document or a stream of events; a client that goes away stops the work."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from muster.errors import MusterError, NumericsError
from muster.server.mailbox import Piece
from muster.server.refusal import RefusalError, refuse
from muster.server.worker import Job, Worker

Document = dict[str, Any]

_LINE_ENDS: Mapping[int, str] = MappingProxyType({ord(end): f"\\u{ord(end):04x}" for end in "\x85\u2028\u2029"})
"""What ends a line in Unicode and is no control character, which JSON escapes anyway."""


@dataclass(frozen=True)
class Extras:
    """What a client wants to be told besides the text.

    Attributes:
        logprobs: log-probabilities.
        token_ids: ids.
        usage: the tokens counted, at the end of a stream.
    """

    logprobs: bool
    token_ids: bool
    usage: bool


class Renderer(Protocol):
    """How one endpoint words answers. It is given every piece once, streaming or not."""

    def opening(self) -> list[Document]:
        """Events before the first piece."""
        ...

    def take(self, piece: Piece) -> list[Document]:
        """Events of a piece."""
        ...

    def closing(self) -> list[Document]:
        """Events after the last piece."""
        ...

    def whole(self) -> Document:
        """Everything that was taken, as one document."""
        ...

    def frame(self, event: Document) -> bytes:
        """An event as it goes over the wire."""
        ...

    @property
    def end(self) -> bytes:
        """What follows the last event."""
        ...


def data(event: Document) -> bytes:
    """An event of a stream without names."""
    return b"data: " + dumps(event) + b"\n\n"


def dumps(document: Document) -> bytes:
    """JSON on one line, also for clients that end lines where Unicode does."""
    text = json.dumps(document, ensure_ascii=False, separators=(",", ":"))
    return text.translate(_LINE_ENDS).encode("utf-8", "backslashreplace")


class Answer(Response):
    """The ASGI response for a job.

    Args:
        worker: where the job is computed; told when nobody waits for it any more.
        job: its answers.
        renderer: words them.
        stream: as events, else as one document when all is there.
        request: whose answer it is.
        patience: seconds that a client may take no data before it counts as gone.
    """

    def __init__(
        self, worker: Worker, job: Job, renderer: Renderer, *, stream: bool, request: Request, patience: float
    ) -> None:
        super().__init__()
        self._worker, self._job, self._renderer = worker, job, renderer
        self._stream = stream
        self._request_id: str = request.state.id
        self._log: dict[str, Any] = request.state.log
        self._patience = patience
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers until the end, or until the client is gone."""
        writing = asyncio.ensure_future(self._write(send))
        watching = asyncio.ensure_future(_gone(receive))
        try:
            await asyncio.wait({writing, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not writing.done():
                self._log["gone"] = True
        finally:
            self._worker.cancel(self._job)
            watching.cancel()
            writing.cancel()
            results = await asyncio.gather(writing, watching, return_exceptions=True)
        if isinstance(results[0], TimeoutError | OSError):
            self._log["gone"] = True
        elif isinstance(results[0], Exception):
            raise results[0]

    async def _write(self, send: Send) -> None:
        try:
            await (self._events(send) if self._stream else self._document(send))
        except MusterError as error:
            refused = refuse(error, self._request_id)
            self._log |= {"status": refused.status, "error": str(error).splitlines()[0]}
            if not self._started:
                await self._start(send, refused.status, "application/json", refused.headers)
                await self._send(send, dumps(refused.body), more=False)
            else:
                await self._send(send, data(refused.body) + self._renderer.end, more=False)

    async def _events(self, send: Send) -> None:
        """Nothing is sent before there is something: what fails at once has its own status."""
        renderer = self._renderer
        async for piece in self._pieces():
            events = renderer.take(piece)
            if not self._started:
                await self._start(send, 200, "text/event-stream", {"cache-control": "no-store"})
                events = [*renderer.opening(), *events]
            if events:
                await self._send(send, b"".join(map(renderer.frame, events)))
        await self._send(send, b"".join(map(renderer.frame, renderer.closing())) + renderer.end, more=False)

    async def _document(self, send: Send) -> None:
        async for piece in self._pieces():
            self._renderer.take(piece)
        body = dumps(self._renderer.whole())
        await self._start(send, 200, "application/json", {"content-length": str(len(body))})
        await self._send(send, body, more=False)

    async def _pieces(self) -> AsyncIterator[Piece]:
        """The pieces of the job; one that ends with an error ends them all."""
        tokens = 0
        async for piece in self._job.mailbox.pieces(len(self._job.requests)):
            tokens += len(piece.token_ids)
            self._log["completion_tokens"] = tokens
            if piece.output is not None:
                self._log["finish_reason"] = piece.output.finish_reason
            if piece.failure is not None:
                raise _told(piece.failure)
            yield piece

    async def _start(self, send: Send, status: int, kind: str, headers: Mapping[str, str]) -> None:
        self._started = True
        named = {"content-type": kind, "x-request-id": self._request_id, **headers}
        raw = [(name.encode(), value.encode()) for name, value in named.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send(self, send: Send, body: bytes, *, more: bool = True) -> None:
        async with asyncio.timeout(self._patience):
            await send({"type": "http.response.body", "body": body, "more_body": more})


def _told(failure: MusterError) -> MusterError:
    """A failure as a client sees it: where numbers went wrong is for the log."""
    if isinstance(failure, NumericsError):
        return RefusalError(500, "numerics", failure.thing, found=failure.found, expected=failure.expected)
    return failure


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
