"""Many clients at once, some of whom leave: nobody else notices, and nothing is left behind."""

import asyncio
import json
import random

import httpx

from server.process import Server

CLIENTS = 64
SECONDS = 60


def wish(chance):
    """A request as one of many kinds of client makes it."""
    if chance.random() < 0.5:
        prompt = "shared beginning of many prompts, " * 2 + str(chance.randrange(5))
    else:
        prompt = [chance.randrange(250) for _ in range(chance.randrange(1, 300))]
    body = {"prompt": prompt, "max_tokens": chance.randrange(1, 60), "ignore_eos": True, "seed": chance.randrange(9)}
    body |= chance.choice([{}, {"logprobs": 2}, {"n": 2}, {"temperature": 0}, {"stop": ["a", "zz"]}])
    return {**body, "stream": chance.random() < 0.7}


async def ask(http, url, body, chance):
    """One request: what became of it; sometimes the client leaves in the middle."""
    leaves = chance.random() < 0.3
    if not body["stream"]:
        try:
            answer = await http.post(url, json=body, timeout=chance.random() if leaves else 120)
        except httpx.TimeoutException:
            return "left"
        assert answer.status_code == 200, answer.text
        assert all(choice["finish_reason"] for choice in answer.json()["choices"])
        return "answered"
    events = chance.randrange(8) if leaves else None
    async with http.stream("POST", url, json=body, timeout=120) as answer:
        assert answer.status_code == 200, await answer.aread()
        finished = 0
        async for line in answer.aiter_lines():
            if events is not None:
                events -= 1
                if events < 0:
                    return "left"
            if line == "data: [DONE]":
                assert finished == body.get("n", 1)
                return "answered"
            if line:
                finished += sum(bool(c["finish_reason"]) for c in json.loads(line.removeprefix("data: "))["choices"])
    raise AssertionError("a stream without an end")


async def load(url):
    chance = random.Random(0)
    ends, outcomes = asyncio.get_running_loop().time() + SECONDS, []
    limits = httpx.Limits(max_connections=None)

    async def client(seed):
        mine = random.Random(seed)
        async with httpx.AsyncClient(limits=limits) as http:
            while asyncio.get_running_loop().time() < ends:
                outcomes.append(await ask(http, f"{url}/v1/completions", wish(mine), mine))

    await asyncio.gather(*(client(chance.random()) for _ in range(CLIENTS)))
    return outcomes


def test_after_many_mixed_streams_and_disconnects_every_page_is_free_and_no_task_is_left(checkpoint):
    # A cache for a third of the clients, so that requests wait and are preempted.
    with Server(checkpoint, "--kv-gib", 3 * 2**20 / 2**30, "--token-budget", 256) as server:
        reference = {"prompt": "hello", "max_tokens": 12, "temperature": 0}
        expected = server.post("/v1/completions", reference).json()["choices"]
        outcomes = asyncio.run(load(server.url))
        assert outcomes.count("answered") > CLIENTS
        assert outcomes.count("left") > CLIENTS / 4
        server.wait(server.at_rest)
        assert server.post("/v1/completions", reference).json()["choices"] == expected
        assert server.get("/health/ready").json()["ready"]
        statuses = [line["status"] for line in server.log if line.get("path") == "/v1/completions" and "status" in line]
        assert set(statuses) == {200}
        # With nothing left to wait for, a drain takes no time: `stop` asserts its exit code.
        server.stop()
        assert server.event("drained")["cut"] == 0
