"""The demo checkpoints on this CPU: Muster beside transformers float32, interleaved in one run.

    python scripts/bench_cpu.py results/cpu.jsonl

Every round times each contestant once, in turn, and the read bandwidth of memory; a record holds the median of the
rounds and all of them. Decode and prefill are tokens per second of a greedy continuation of the same prompt.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from setting import arguments, setting

from muster import LLM, SamplingParams, env
from muster.lab.build.demo import write_demo
from muster.lab.measure.bandwidth import read_bandwidth

PREFILL = 512
DECODE = 64
ROUNDS = 5


def main() -> None:
    """Measures and writes one JSON line per figure."""
    options = arguments(__doc__, ROUNDS)

    demo = env.read().home / "demo"
    write_demo(demo)
    records = [load_record(demo / name) for name in ("nvfp4", "bf16")]
    records += speed_records(demo, options.rounds)

    options.output.parent.mkdir(parents=True, exist_ok=True)
    with options.output.open("w") as lines:
        for record in records:
            lines.write(json.dumps({**record, **setting("transformers")}) + "\n")
    print_table(records)


def speed_records(demo: Path, rounds: int) -> list[dict[str, Any]]:
    """Decode and prefill of every contestant, and the read bandwidth of the same rounds."""
    ours = {f"muster {name}": LLM(demo / name) for name in ("nvfp4", "bf16")}
    contestants: dict[str, Callable[[], tuple[float, float]]] = {
        **{name: lambda llm=llm: time_muster(llm) for name, llm in ours.items()},
        "transformers float32": transformers_contestant(demo / "bf16"),
    }
    batched = ours["muster nvfp4"]
    for contestant in contestants.values():
        contestant()  # the first call compiles and warms

    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in contestants}
    bandwidth: list[float] = []
    batch: dict[int, list[float]] = {8: [], 32: []}
    beside: list[float] = []
    for index in range(rounds):
        bandwidth.append(read_bandwidth(torch.device("cpu")))
        for name, contestant in contestants.items():
            runs[name].append(contestant())
        for count, rates in batch.items():
            rates.append(time_batch(batched, count))
        with a_busy_core():
            beside.append(time_muster(batched)[1])
        sys.stderr.write(f"round {index + 1} of {rounds}\n")

    records = [figure("read bandwidth, GB/s", "all threads", [value / 1e9 for value in bandwidth])]
    for name, pairs in runs.items():
        extra: dict[str, Any] = {}
        if name in ours:
            stats = ours[name].stats
            floor = statistics.median(bandwidth) / stats.weight_bytes_per_token
            extra = {
                "weight_bytes_per_token": stats.weight_bytes_per_token,
                "floor_tok_s": round(floor, 1),
                "backends": stats.backends,
            }
        records.append(figure("decode, tok/s", name, [decode for _, decode in pairs], **extra))
        records.append(figure(f"prefill of {PREFILL}, tok/s", name, [prefill for prefill, _ in pairs]))
    for count, rates in batch.items():
        records.append(figure(f"decode of {count} requests, tok/s", "muster nvfp4", rates))
    records.append(figure("decode beside a busy core, tok/s", "muster nvfp4", beside))
    return records


def time_muster(llm: LLM) -> tuple[float, float]:
    """Tokens per second of prefill and decode."""
    before = llm.stats
    llm.generate([prompt_ids(time.time_ns())], SamplingParams(max_tokens=DECODE + 1, ignore_eos=True))
    stats = llm.stats.since(before)
    return stats.prefill_rate, stats.decode_rate


def time_batch(llm: LLM, count: int) -> float:
    """Tokens per second of `count` requests decoding together."""
    before = llm.stats
    prompts = [prompt_ids(time.time_ns() + i)[:16] for i in range(count)]
    llm.generate(prompts, SamplingParams(max_tokens=DECODE + 1, ignore_eos=True))
    return llm.stats.since(before).decode_rate


@contextmanager
def a_busy_core() -> Iterator[None]:
    """Another program that takes all of a core's time."""
    program = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        program.kill()
        program.wait()


def transformers_contestant(directory: Path) -> Callable[[], tuple[float, float]]:
    """The same for transformers, float32."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def run() -> tuple[float, float]:
        ids = torch.tensor([prompt_ids(time.time_ns())])
        with torch.inference_mode():
            start = time.perf_counter()
            output = model(ids, use_cache=True, logits_to_keep=1)
            prefill = PREFILL / (time.perf_counter() - start)
            token = output.logits[:, -1].argmax(-1, keepdim=True)
            start = time.perf_counter()
            for _ in range(DECODE // 2):
                output = model(token, past_key_values=output.past_key_values, use_cache=True)
                token = output.logits[:, -1].argmax(-1, keepdim=True)
            return prefill, DECODE // 2 / (time.perf_counter() - start)

    return run


def prompt_ids(seed: int) -> list[int]:
    """A prompt of random ids, different for every seed so that no prefix is found in a cache."""
    generator = torch.Generator().manual_seed(seed % (1 << 62))
    return torch.randint(100, 49_000, (PREFILL,), generator=generator).tolist()


def load_record(directory: Path) -> dict[str, Any]:
    """Seconds and peak memory of loading in a fresh process, beside the checkpoint's bytes."""
    output = subprocess.run(
        [sys.executable, __file__, "--load", str(directory)], check=True, capture_output=True, text=True
    )
    values: dict[str, Any] = json.loads(output.stdout)
    return {"what": "load", "who": f"muster {directory.name}", **values}


def load_once(directory: Path) -> None:
    """What `load_record` runs: the second load of a process whose imports are done."""
    from muster.model.families import load

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    start = time.perf_counter()
    decoder = load(directory)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    files = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    print(
        json.dumps(
            {
                "seconds": round(seconds, 3),
                "peak_bytes": peak,
                "weight_bytes": decoder.weight_bytes,
                "checkpoint_bytes": files,
                "peak_above_weights_per_checkpoint_byte": round((peak - decoder.weight_bytes) / files, 3),
            }
        )
    )


def figure(what: str, who: str, rounds: list[float], **extra: Any) -> dict[str, Any]:
    """One record: the median and every round."""
    return {
        "what": what,
        "who": who,
        "median": round(statistics.median(rounds), 2),
        "rounds": [round(r, 2) for r in rounds],
        **extra,
    }


def print_table(records: list[dict[str, Any]]) -> None:
    """The figures for a reader."""
    for record in records:
        if record["what"] == "load":
            extra = record["peak_above_weights_per_checkpoint_byte"]
            print(f"{'load, s':28} {record['who']:22} {record['seconds']:8.2f}  peak above weights: {extra} x file")
        else:
            floor = f"  floor {record['floor_tok_s']}" if "floor_tok_s" in record else ""
            print(f"{record['what']:28} {record['who']:22} {record['median']:8.2f}{floor}")


if __name__ == "__main__":
    if sys.argv[1] == "--load":
        load_once(Path(sys.argv[2]))
    else:
        main()
