"""What every request passes: an id, the Host, the API key, the log, and one shape for all errors."""

from __future__ import annotations

import re
import secrets
import time
import traceback
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from muster.errors import MusterError
from muster.server.answers import dumps
from muster.server.logs import log
from muster.server.metrics import Metrics
from muster.server.refusal import RefusalError, Refused, internal, refuse

OPEN_PATHS = ("/health/live", "/health/ready", "/")
"""What needs no key: probes have none, and the page asks for it."""
_OPEN_PREFIX = "/page/"
_POLLED_PATHS = ("/health/live", "/health/ready", "/metrics", "/v1/muster/state")
"""Asked again and again by probes and open pages: a good answer is counted and not worth a line of the log."""
_LOCAL = re.compile(r"(localhost|127(\.\d{1,3}){3}|\[::1\])(:\d+)?", re.IGNORECASE)
_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")


class Gate:
    """ASGI middleware around the whole application.

    Args:
        app: behind the gate.
        keys: API keys; empty lets everybody in.
        local: take no Host but this machine's own names, lest a web page under a name of its own that leads here talk
            to the server through its reader's browser.
        metrics: told of every answer.
    """

    def __init__(self, app: ASGIApp, *, keys: tuple[str, ...], local: bool, metrics: Metrics) -> None:
        self._app, self._keys, self._local, self._metrics = app, keys, local, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Passes the request on; whatever it raises becomes an answer."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        record: dict[str, Any] = {}
        scope.setdefault("state", {}).update(id=request_id, log=record)
        began = time.perf_counter()
        started = False

        async def watched(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                record.setdefault("status", message["status"])
                if not any(name == b"x-request-id" for name, _ in message["headers"]):
                    message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        try:
            self._check_host(headers)
            self._check_key(scope["path"], headers)
            await self._app(scope, receive, watched)
        except MusterError as error:
            record["error"] = str(error).splitlines()[0]
            await _answer(refuse(error, request_id), watched)
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
            log("bug", id=request_id, traceback=traceback.format_exc())
            if not started:
                await _answer(internal(request_id), watched)
        finally:
            self._tell(scope, request_id, record, time.perf_counter() - began)

    def _check_host(self, headers: Headers) -> None:
        host = headers.get("host", "")
        if self._local and not _LOCAL.fullmatch(host):
            hint = "behind a proxy of another name, use --api-key-file"
            raise RefusalError(421, "host", "Host", found=repr(host[:100]), expected="localhost", hint=hint)

    def _check_key(self, path: str, headers: Headers) -> None:
        if not self._keys or path in OPEN_PATHS or path.startswith(_OPEN_PREFIX):
            return
        scheme, _, key = headers.get("authorization", "").partition(" ")
        matches = [secrets.compare_digest(key.strip().encode(), known.encode()) for known in self._keys]
        if scheme.lower() != "bearer" or not any(matches):
            expected = "Authorization: Bearer KEY with a key of this server"
            raise RefusalError(
                401, "invalid_api_key", "API key", found="none" if not key else "another", expected=expected
            )

    def _tell(self, scope: Scope, request_id: str, record: dict[str, Any], seconds: float) -> None:
        route = scope.get("route")
        path = getattr(route, "path", "other")
        status = record.get("status", 499)
        self._metrics.observe_http(path, status)
        if path in _POLLED_PATHS and status == 200:
            return
        client = scope.get("client")
        log(
            "request",
            id=request_id,
            method=scope["method"],
            path=path,
            seconds=round(seconds, 6),
            client=client[0] if client else None,
            **record,
        )


async def _answer(refused: Refused, send: Any) -> None:
    body = dumps(refused.body)
    headers = {"content-type": "application/json", "content-length": str(len(body)), **refused.headers}
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": refused.status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
