"""A client of OpenAI's completions over HTTP: what every server of language models answers."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from muster.errors import EnvironmentLackError, MusterError
from muster.lab.load.events import Events
from muster.lab.load.outcome import Answer, Failure, Kind, RequestFailedError, spread_tokens

if TYPE_CHECKING:
    import httpx

_LONGEST = 200
"""Characters of a message that are kept."""
_KEEP_ALIVE = 2.0
"""Seconds that a connection is kept for the next request: less than any server keeps it, so that none is found shut."""
_TOGETHER = 32
"""Requests of one pool of connections: it looks through all it has for each request, so many pools are quicker."""
_PATIENCE = 30.0
"""Seconds for the list of models."""


class Client:
    """Speaks to one server.

    Args:
        pools: the connections.
        model: the name that requests give.
    """

    def __init__(self, pools: Pools, model: str) -> None:
        self._pools = pools
        self.model = model

    @classmethod
    @asynccontextmanager
    async def open(cls, url: str, *, model: str | None, key: str | None) -> AsyncIterator[Client]:
        """Connections to a server, as many as there are requests.

        Args:
            url: without the `/v1`.
            model: its name; None: the only one there.
            key: for `Authorization`.

        Raises:
            EnvironmentLackError: httpx is not installed.
            MusterError: the server does not tell its model.
        """
        try:
            import httpx
        except ImportError:
            raise EnvironmentLackError(
                "muster bench --server", found="no httpx", expected="it", hint="pip install 'muster-moe[load]'"
            ) from None
        _allow_connections()
        headers = {"Accept-Encoding": "identity", **({"Authorization": f"Bearer {key}"} if key else {})}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=_KEEP_ALIVE)
        encryption = httpx.create_ssl_context()
        pools = Pools(
            lambda: httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=None, verify=encryption)
        )
        try:
            if model is None:
                async with pools.lent() as http:
                    model = await _only_model(http, url)
            yield cls(pools, model)
        finally:
            await pools.close()

    async def complete(self, prompt: str, tokens: int, *, since: float = 0.0) -> Answer:
        """Streams one completion to its end.

        Args:
            prompt: a text.
            tokens: to generate, whatever they are.
            since: `time.monotonic()` of the clock that the chunks' times are on.

        Raises:
            RequestFailedError: there is no whole answer.
        """
        import httpx

        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
        }
        transcript = Transcript(since)
        try:
            async with self._pools.lent() as http, http.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    raise _refused(response.status_code, await response.aread())
                async for piece in response.aiter_raw():
                    transcript.take(piece, time.monotonic())
        except httpx.HTTPError as error:
            raise RequestFailedError(_broken(error, begun=transcript.begun)) from error
        return transcript.answer()


class Pools:
    """Pools of connections, as many as the requests under way need; the first ones are used first.

    Args:
        make: another pool.
    """

    def __init__(self, make: Callable[[], httpx.AsyncClient]) -> None:
        self._make = make
        self._pools: list[httpx.AsyncClient] = []
        self._lent: list[int] = []

    @asynccontextmanager
    async def lent(self) -> AsyncIterator[httpx.AsyncClient]:
        """One for one request."""
        number = next((i for i, lent in enumerate(self._lent) if lent < _TOGETHER), len(self._pools))
        if number == len(self._pools):
            self._pools.append(self._make())
            self._lent.append(0)
        self._lent[number] += 1
        try:
            yield self._pools[number]
        finally:
            self._lent[number] -= 1

    async def close(self) -> None:
        """Ends all connections."""
        for pool in self._pools:
            await pool.aclose()


class Transcript:
    """One streamed answer as far as it has come.

    Args:
        since: `time.monotonic()` of the clock that times are told on.
    """

    def __init__(self, since: float) -> None:
        self._since = since
        self._events = Events()
        self._times: list[float] = []
        self._sizes: list[int] = []
        self._usage: Mapping[str, Any] | None = None
        self._done = False

    @property
    def begun(self) -> bool:
        """Whether any of the answer has come."""
        return bool(self._times)

    def take(self, piece: bytes, now: float) -> None:
        """Bytes as they came off the wire.

        Raises:
            RequestFailedError: they tell of an error, or nothing that can be understood.
        """
        for event in self._events.feed(piece):
            if event == b"[DONE]":
                self._done = True
                return
            try:
                document = json.loads(event)
                self._read(document, now - self._since)
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                text = event.decode(errors="replace")
                raise RequestFailedError(Failure(Kind.MALFORMED, text[:_LONGEST])) from error

    def answer(self) -> Answer:
        """The answer, now that the stream is over.

        Raises:
            RequestFailedError: it is over too early, or without a count of tokens.
        """
        if not self._done:
            raise RequestFailedError(Failure(Kind.NO_END))
        if self._usage is None:
            raise RequestFailedError(Failure(Kind.MALFORMED, "no usage, though stream_options asked for it"))
        prompt, tokens = self._usage.get("prompt_tokens"), self._usage.get("completion_tokens")
        if not (isinstance(prompt, int) and isinstance(tokens, int) and self._times and tokens > 0):
            found = f"{len(self._times)} chunks of text with usage {json.dumps(self._usage)}"
            raise RequestFailedError(Failure(Kind.MALFORMED, found[:_LONGEST]))
        return Answer(prompt, tokens, spread_tokens(self._times, self._sizes, tokens))

    def _read(self, document: Mapping[str, Any], at: float) -> None:
        if "error" in document or document.get("object") == "error":
            raise RequestFailedError(Failure(Kind.ERROR, _message(document)))
        for choice in document["choices"]:
            self._times.append(at)
            self._sizes.append(len((choice.get("text") or "").encode("utf-8", "surrogatepass")))
        if document.get("usage"):
            self._usage = document["usage"]


def _refused(status: int, body: bytes) -> RequestFailedError:
    try:
        message = _message(json.loads(body))
    except (ValueError, AttributeError):
        message = body.decode(errors="replace")
    return RequestFailedError(Failure(Kind.HTTP, _line(message), status))


def _message(document: Mapping[str, Any]) -> str:
    """The message of an error, where servers put it."""
    error = document.get("error", document)
    found = error.get("message") if isinstance(error, dict) else error
    return _line(str(found or document.get("detail") or json.dumps(document)))


def _broken(error: httpx.HTTPError, *, begun: bool) -> Failure:
    """A connection that was not made, or ended in the middle of an answer."""
    message = f"{type(error).__name__} {error}".strip()
    return Failure(Kind.NO_END if begun else Kind.CONNECTION, _line(message))


def _line(text: str) -> str:
    return " ".join(text.split())[:_LONGEST]


def _allow_connections() -> None:
    """A request that the server leaves waiting holds a connection, and the usual limit of open files is 1,024."""
    if sys.platform != "win32":
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _only_model(http: httpx.AsyncClient, url: str) -> str:
    import httpx

    try:
        response = await http.get("/v1/models", timeout=_PATIENCE)
        if response.status_code != httpx.codes.OK:
            raise _refused(response.status_code, response.content)
        names = [str(one["id"]) for one in response.json()["data"]]
    except (httpx.HTTPError, RequestFailedError, ValueError, LookupError, TypeError) as error:
        found = str(_broken(error, begun=False) if isinstance(error, httpx.HTTPError) else error)
        raise MusterError(f"{url}/v1/models", found=_line(found), expected="the models served there") from error
    if len(names) != 1:
        found = ", ".join(names) or "no model"
        raise MusterError(f"{url}/v1/models", found=found, expected="one model", hint="--model NAME chooses")
    return names[0]
