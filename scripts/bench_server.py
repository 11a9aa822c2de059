"""What the server adds to the engine: one client beside the same request in process, and many clients beside one.

    python scripts/bench_server.py results/server.jsonl

The demo checkpoint with NVFP4 experts. Every round asks the engine in this process and the server in its own for the
same prompt, which neither has seen before, and then the server by many clients at once; a record holds the median of
the rounds and all of them. The last record is what `muster bench --server` prints of the same server.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
from demo_story import told
from setting import arguments, setting

from muster import LLM, SamplingParams, env
from muster.lab.build.demo import write_demo

ROUNDS = 5
LOAD = "--rate 1,2,4 --seconds 15 --lengths fixed:64,32 --warm-up 4 --slo ttft=500ms,tbt=50ms"
CLIENTS = 32
PROMPT, ANSWER = 32, 128
SHOWN = "http://localhost:8000"
"""What a page shows for the server's URL, whose port is any that was free."""


def main() -> None:
    """Measures and writes one JSON line per figure."""
    options = arguments(__doc__, ROUNDS)
    demo = env.read().home / "demo"
    write_demo(demo)

    rounds: dict[tuple[str, str], list[float]] = {}
    llm = LLM(demo / "nvfp4")
    with served(demo / "nvfp4") as url, httpx.Client(base_url=url, timeout=600) as client:
        for number in range(-1, options.rounds):
            # The first round warms both up.
            for key, figure in round_of(llm, client, number).items():
                rounds.setdefault(key, []).extend([figure] if number >= 0 else [])
        load = load_record(url)

    with options.output.open("w") as lines:
        for (what, who), figures in rounds.items():
            record = {"what": what, "who": who, "median": round(statistics.median(figures), 2), "rounds": figures}
            lines.write(json.dumps({**record, **setting()}) + "\n")
            print(f"{what:28} {who:14} {record['median']:8.2f}")
        lines.write(json.dumps({**load, **setting()}) + "\n")


def round_of(llm: LLM, client: httpx.Client, number: int) -> dict[tuple[str, str], float]:
    """Every figure once, by what it is and whose."""
    prompt = prompt_of(number, 0)
    params = SamplingParams(max_tokens=ANSWER, ignore_eos=True, temperature=0.0)
    contestants: dict[str, Callable[[], Iterator[object]]] = {
        "in process": lambda: llm.stream(prompt, params),
        "one client": lambda: streamed(client, prompt),
    }
    figures: dict[tuple[str, str], float] = {}
    for who in sorted(contestants, reverse=bool(number % 2)):
        first, rate = timed(contestants[who])
        figures["time to first token, ms", who] = round(1000 * first, 2)
        figures["decode, tok/s", who] = round(rate, 2)
    figures["total, tok/s", "one client"] = round(total(client, number, 1), 2)
    figures["total, tok/s", f"{CLIENTS} clients"] = round(total(client, number, CLIENTS), 2)
    return figures


def load_record(url: str) -> dict[str, object]:
    """What `muster bench --server` prints of this server."""
    record = told(str(env.read().home), "bench", "--server", url, *LOAD.split())
    return {**record, "what": "load", "stdout": str(record["stdout"]).replace(url, SHOWN)}


def timed(start: Callable[[], Iterator[object]]) -> tuple[float, float]:
    """Seconds to the first token, and tokens per second from there on."""
    began = time.perf_counter()
    pieces = start()
    next(pieces)
    first = time.perf_counter()
    for _ in pieces:
        pass
    return first - began, (ANSWER - 1) / (time.perf_counter() - first)


def total(client: httpx.Client, number: int, clients: int) -> float:
    """Tokens of all answers per second, from the first question to the end of the last answer."""
    prompts = [prompt_of(number, 1 + clients + index) for index in range(clients)]
    began = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        list(pool.map(lambda prompt: sum(1 for _ in streamed(client, prompt)), prompts))
    return clients * ANSWER / (time.perf_counter() - began)


def prompt_of(number: int, client: int) -> list[int]:
    """Token ids that no other client and no other round begins with."""
    return [1000 + number, 2000 + client, *range(100, 98 + PROMPT)]


def streamed(client: httpx.Client, prompt: list[int]) -> Iterator[str]:
    """The events of a streamed completion."""
    body = {"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
    with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as answer:
        answer.raise_for_status()
        yield from (line for line in answer.iter_lines() if line.startswith("data: {"))


@contextmanager
def served(model: Path) -> Iterator[str]:
    """A server in a process of its own; its URL."""
    command = [sys.executable, "-m", "muster.cli", "serve", str(model), "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            url = listening(process.stderr)
            while httpx.get(f"{url}/health/ready").status_code != 200:
                time.sleep(0.1)
            # A pipe that nobody empties would stop the server in the end.
            ThreadPoolExecutor(1).submit(process.stderr.read)
            yield url
        finally:
            process.terminate()


def listening(log: Iterable[str]) -> str:
    """The URL of the server that writes this log."""
    for line in log:
        if '"listening"' in line:
            return str(json.loads(line)["url"])
    sys.exit("the server ended before it listened")


if __name__ == "__main__":
    main()
