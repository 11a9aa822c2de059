"""A small server of completions that misbehaves as told: real sockets, in a thread of its own."""

import asyncio
import json
import threading
import time

MODELS = ({"id": "toy"},)


class Reply:
    """What a script answers one request with."""

    def __init__(self, number, body, headers, writer):
        self.number, self.body, self.headers = number, body, headers
        self.words = len(body.get("prompt", "").split())
        self.tokens = body.get("max_tokens")
        self._writer = writer
        self._begun = False

    async def send(self, data):
        self._writer.write(data)
        await self._writer.drain()

    async def status(self, code, document):
        head = f"HTTP/1.1 {code} Told\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
        await self.send(head.encode() + json.dumps(document).encode())

    async def event(self, document):
        if not self._begun:
            self._begun = True
            await self.send(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n")
        text = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
        await self.send(f"data: {text}\n\n".encode())

    async def text(self, text):
        await self.event({"choices": [{"index": 0, "text": text}], "usage": None})

    async def usage(self, prompt=None, answer=None):
        counts = {"prompt_tokens": prompt or 2 + 3 * self.words, "completion_tokens": answer or self.tokens}
        await self.event({"choices": [], "usage": counts})

    async def end(self):
        await self.event("[DONE]")


async def steady(reply):
    """Every token at once, a chunk each; a prompt has three tokens per word and two more."""
    for _ in range(reply.tokens):
        await reply.text("word ")
    await reply.usage()
    await reply.end()


class Endpoint:
    """Listens at `url`; `script` answers completions, numbered from 0 without the two by which a client gauges it."""

    def __init__(self, script=steady, *, models=MODELS, probes=True):
        self._script, self._models = script, models
        self._number = -2 if probes else 0
        self.arrived = []
        self.bodies = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)

    def __enter__(self):
        self._thread.start()
        start = asyncio.start_server(self._connection, "127.0.0.1", 0)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *_):
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _stop(self):
        self._server.close()
        mine = asyncio.all_tasks() - {asyncio.current_task()}
        for task in mine:
            task.cancel()
        await asyncio.gather(*mine, return_exceptions=True)

    async def _connection(self, reader, writer):
        try:
            await self._answer(reader, writer)
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader, writer):
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:])}
        raw = await reader.readexactly(int(headers.get("content-length", 0)))
        if "/v1/models" in head[0]:
            await Reply(0, {}, headers, writer).status(200, {"data": self._models})
            return
        assert head[0].startswith("POST /v1/completions "), head[0]
        number, self._number = self._number, self._number + 1
        reply = Reply(number, json.loads(raw), headers, writer)
        if number < 0:
            await steady(reply)
            return
        self.arrived.append(time.monotonic())
        self.bodies.append(reply.body)
        await self._script(reply)
