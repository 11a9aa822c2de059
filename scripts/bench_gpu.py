"""Proves and times expert layers on this GPU at full size, ours and other engines' in turn: verdict first, then time.

    python scripts/bench_gpu.py RESULTS.jsonl [--layers FORMAT:SHAPE,...] [--tokens LIST] [--backends NAMES]
        [--peers NAMES] [--seconds SECONDS] [--commit HASH]

Weights are drawn on the GPU. Each call goes on with the next routing, and with the next of as many copies of the
weights as it takes that none is found in the cache. Peers (`scripts/peers.py`) take part where vLLM can be imported.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from contenders import Contender, hold, ours, reason, theirs
from layers import GPU, SHAPES, layer, problem, routings
from peer import Call
from peer_vllm import session
from peers import PEERS
from setting import setting
from torch import Tensor

from muster.device import DTYPES, Device, cuda, last_level_cache
from muster.formats.rounding import EXACT, Rounding
from muster.lab.ledger.environment import current
from muster.lab.ledger.evidence import Errors, Verdict
from muster.lab.measure.floor import Floor, floor
from muster.lab.measure.peaks import Peaks, measured
from muster.lab.measure.timing import Sample, copies, measure
from muster.lab.prove.cases import Role
from muster.lab.prove.tolerance import LIMITS, decide, grade
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.moe.reference import expert_layer
from muster.moe.weights import ExpertWeights

FORMATS = ("nvfp4", "mxfp4", "fp8-block", "bf16")
LAYERS = (
    *(("nvfp4", shape) for shape in ("397B", "30B", "Mixtral", "GLM-5/8", "397B/8", "397B/2")),
    ("mxfp4", "gpt-oss"),
    ("fp8-block", "DeepSeek-V3/8"),
    *(("bf16", shape) for shape in ("30B", "397B", "Mixtral")),
)
"""Those of the page."""
JUDGED = 8
"""Tokens of a batch that are judged: each result stands alone."""
ROUTINGS, FEW_ROUTINGS, FEW_FROM = 12, 3, 512
"""Routings in turn; few from so many tokens on, where each touches nearly all experts."""


@dataclass(frozen=True)
class Batch:
    """Tokens with their routings in turn.

    Attributes:
        x_TD: the tokens.
        routings: whole turns of the copies.
        floors: of each routing.
        copies: of the weights, so that none is found in the cache.
    """

    x_TD: Tensor
    routings: list[Routed]
    floors: list[Floor]
    copies: int

    @staticmethod
    def of(problem: MoEProblem, tokens: int, peaks: Peaks, cache: int, device: torch.device) -> Batch:
        """A batch of random tokens; between two uses of a copy the others bring more than a `cache` of bytes holds."""
        few = FEW_ROUTINGS if tokens >= FEW_FROM else ROUTINGS
        several = routings(problem, tokens, few, device)
        wanted = copies(min(floor(problem, tokens, one, peaks).weight_bytes for one in several), cache)
        several += routings(problem, tokens, -few % wanted, device)
        x = torch.randn(tokens, problem.hidden, device=device).to(DTYPES[problem.dtype])
        return Batch(x, several, [floor(problem, tokens, one, peaks) for one in several], wanted)

    @property
    def floor(self) -> float:
        """Seconds that the hardware needs for one call, on average."""
        return sum(each.seconds for each in self.floors) / len(self.floors)

    def calls(self, contender: Contender) -> list[Call]:
        """The calls in turn, into an output of NaN."""
        out, layers = torch.full_like(self.x_TD, torch.nan), contender.layers[: self.copies]
        return [layers[turn % len(layers)].call(self.x_TD, one, out) for turn, one in enumerate(self.routings)]


class Judge:
    """Knows what some tokens of a batch should become under its first routing."""

    def __init__(self, problem: MoEProblem, weights: ExpertWeights, batch: Batch) -> None:
        self._problem, self._weights, routed = problem, weights, batch.routings[0]
        self._some = torch.randperm(len(batch.x_TD), device=batch.x_TD.device)[:JUDGED]
        self._x, self._routed = batch.x_TD[self._some], Routed(routed.ids_TK[self._some], routed.weights_TK[self._some])
        self._truths: dict[Rounding, Tensor] = {}

    def judge(self, contender: Contender, call: Call) -> tuple[Verdict, Errors]:
        """The worse word on two runs, the second over poisoned scratch and where possible by graph replay."""
        runs = [call().clone()]
        for buffer in contender.scratch.buffers:
            buffer.fill_(torch.nan if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)
        runs.append(_replayed(call) if contender.graph_safe and self._x.is_cuda else call())
        limit = LIMITS[grade(contender.rounding, self._problem.dtype)].of(len(self._some))
        computed, ideal = self._truth(contender.rounding), self._truth(EXACT)
        words = [decide(run[self._some], computed, ideal, limit) for run in runs]
        if not torch.equal(*runs):
            print(f"{contender.name}: two runs differ", file=sys.stderr)
        return next((word for word in words if word[0] is not Verdict.PROVEN), words[0])

    def _truth(self, rounding: Rounding) -> Tensor:
        if rounding not in self._truths:
            given = (self._problem, self._weights, self._x, self._routed)
            self._truths[rounding] = expert_layer(*given, rounding=rounding)
        return self._truths[rounding]


def _replayed(call: Call) -> Tensor:
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    result.fill_(torch.nan)
    graph.replay()
    return result.clone()


def points(
    problem: MoEProblem, device: Device, peaks: Peaks, given: argparse.Namespace
) -> Iterator[list[dict[str, Any]]]:
    """First why a peer, or whoever failed, takes no part; then for each token count a record of each contender."""
    backends, declined = ours(problem, device, given.backends)
    peers, cannot = theirs(problem, given.tokens, given.peers)
    for name, why in declined.items():
        print(f"{name}: declined: {why}", file=sys.stderr)
    contenders, weights = [*backends, *peers], layer(problem, device.torch_device)
    cache = last_level_cache(device.torch_device)
    batches = {tokens: Batch.of(problem, tokens, peaks, cache, device.torch_device) for tokens in given.tokens}
    failed = hold(contenders, weights, max(batch.copies for batch in batches.values()), device.torch_device)
    yield [{"backend": name, "verdict": "declined", "why": why} for name, why in {**cannot, **failed}.items()]
    for tokens, batch in batches.items():
        able = [each for each in contenders if each.layers and tokens <= (each.max_tokens or tokens)]
        judge = Judge(problem, weights, batch)
        yield [{"tokens": tokens, **one} for one in compared(able, batch, judge, given.seconds)]


def compared(contenders: Sequence[Contender], batch: Batch, judge: Judge, seconds: float) -> Iterator[dict[str, Any]]:
    """Judges each, then times all that ran, in turn."""
    calls: dict[str, list[Call]] = {}
    words: dict[str, tuple[Verdict, Errors]] = {}
    for each in contenders:
        try:
            several = batch.calls(each)
            words[each.name] = judge.judge(each, several[0])
            calls[each.name] = several
        except Exception as error:
            yield {"backend": each.name, "peer": each.peer, "verdict": "crash", "why": reason(error)}
            if batch.x_TD.is_cuda:
                torch.cuda.synchronize()  # raises where nothing else can run in this process either
    safe = {each.name for each in contenders if each.graph_safe}
    samples = measure(calls, device=batch.x_TD.device, graph_safe=safe, seconds=seconds)  # type: ignore[arg-type]
    running = [each for each in contenders if each.name in samples]
    yield from (measurement(each, batch, samples[each.name], *words[each.name]) for each in running)


def measurement(who: Contender, batch: Batch, sample: Sample, word: Verdict, errors: Errors) -> dict[str, Any]:
    """What a record says of one contender."""
    return {
        "backend": who.name,
        "peer": who.peer,
        "verdict": word.value,
        "whole": errors.whole,
        "worst_token": errors.worst_token,
        "ideal_whole": errors.ideal_whole,
        "microseconds": sample.median * 1e6,
        "low": sample.low * 1e6,
        "high": sample.high * 1e6,
        "floor_microseconds": batch.floor * 1e6,
        "share": batch.floor / sample.median,
        "copies": min(batch.copies, len(who.layers)),
        "cold": batch.copies <= len(who.layers),
    }


def described(records: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A line for each record of one token count: beside the best peer that is right, where there is one."""
    proven = [one for one in records if one.get("peer") and one["verdict"] == Verdict.PROVEN.value]
    rival = min((one["microseconds"] for one in proven), default=None)
    for one in records:
        start = f"{one['shape']:13} {one['format']:9} {one['backend']:12} T={one.get('tokens', ''):<5}"
        if "why" in one:
            yield f"{start}{one['verdict']}: {one['why']}"
            continue
        times = "" if rival is None else f"  {rival / one['microseconds']:.2f}x"
        warm = "" if one["cold"] else "  (some weights from the cache)"
        yield (
            f"{start}{one['verdict']:7} {one['whole']:.1e} {one['microseconds']:8.1f} us"
            f"  floor {one['floor_microseconds']:7.1f}  {one['share']:.2f}{times}{warm}"
        )


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """What to compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--layers", type=_layers, default=LAYERS, help="nvfp4:30B and so on; by default the page's")
    parser.add_argument("--tokens", type=_counts, default=_counts("1,2,4,8,16,32,64,128,512,2048,8192"))
    parser.add_argument("--backends", type=_names(), help="ours; by default all that can")
    parser.add_argument("--peers", type=_peers, help="other engines'; by default all that can, or none")
    parser.add_argument("--seconds", type=float, default=0.05, help="for each contender and point, beside warm-up")
    parser.add_argument("--commit", help="what is measured, where git cannot say it")
    return parser.parse_args(words)


def _names(known: Collection[str] = ()) -> Callable[[str], list[str]]:
    def names(text: str) -> list[str]:
        several = text.split(",")
        strange = [name for name in several if known and name not in known]
        if strange:
            raise argparse.ArgumentTypeError(f"no {', '.join(strange)}; there are {', '.join(known)}")
        return several

    return names


def _layers(text: str) -> list[tuple[str, str]]:
    known = {f"{format}:{shape}": (format, shape) for format in FORMATS for shape in SHAPES}
    return [known[name] for name in _names(known)(text)]


def _peers(text: str) -> list[str]:
    return [] if text == "none" else _names(dict.fromkeys(peer.name for peer in PEERS))(text)


def _counts(text: str) -> list[int]:
    return [int(count) for count in text.split(",")]


def machine(peaks: Peaks, commit: str | None) -> dict[str, Any]:
    """What every record of this run says of itself."""
    here = current(cuda(), Role.EXPERTS.value, "torch")
    return {
        "run": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": here["device"],
        "driver": here["driver"],
        "cuda": here["cuda"],
        "read_bandwidth": peaks.read_bandwidth,
        "operations": peaks.operations,
        **setting(*installed("triton", "vllm", "humming-kernels"), commit=commit),
    }


def installed(*packages: str) -> list[str]:
    """Those of them that are."""
    found = []
    for name in packages:
        try:
            version(name)
        except PackageNotFoundError:
            continue
        found.append(name)
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Prints a line for each measurement and appends its record, one token count after the other."""
    given, started = arguments(sys.argv[1:] if words is None else words), time.time()
    if not torch.cuda.is_available():
        print("no GPU that torch can use: see nvidia-smi", file=sys.stderr)
        sys.exit(3)
    peaks = measured(GPU)
    constant = machine(peaks, given.commit)
    print(constant, file=sys.stderr)
    with torch.inference_mode(), ExitStack() as stack, given.results.open("a") as results:
        given.peers = joined(stack, given.peers)
        for format, shape in given.layers:
            for point in points(problem(shape, format), cuda(), peaks, given):
                several = [constant | {"shape": shape, "format": format} | one for one in point]
                results.writelines(json.dumps(one) + "\n" for one in several)
                results.flush()
                print(*described(several), sep="\n", end="\n" * bool(several), flush=True)
            torch.cuda.empty_cache()
            print(f"{shape} {format}: {time.time() - started:.0f} s so far", file=sys.stderr, flush=True)


def joined(stack: ExitStack, peers: list[str] | None) -> list[str] | None:
    """Those peers, in what they need around them; none where that cannot be."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    if peers == []:
        return peers
    try:
        stack.enter_context(session())
    except Exception as error:
        print(f"no peers: {reason(error)}; to compare, put vLLM on PYTHONPATH", file=sys.stderr)
        return []
    return peers


if __name__ == "__main__":
    main()
