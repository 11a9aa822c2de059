"""The only timer: backends side by side, in turn, each over several copies of its weights, as medians with quartiles.

When a model comes back to a layer, the layers between have pushed its weights out of the cache. So every call here goes
on with the next copy, and there are so many copies that none is found in the cache.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster import env
from muster.device import Device, cpu, cuda, free_memory, last_level_cache
from muster.formats.matrix import QuantMatrix
from muster.lab.measure.clock import Call, Clock
from muster.lab.measure.floor import Floor, floor
from muster.lab.measure.peaks import Peaks, peaks
from muster.lab.prove import child
from muster.lab.prove.candidate import Candidate
from muster.lab.prove.cases import Case, ExpertInputs, Inputs, Part, build
from muster.workspace import Workspace

TIE = 0.03
"""Two medians closer than this part of the faster one are equal."""
NOISY = 0.10
"""Quartiles further apart than this part of the median: something else was using the machine."""
CACHES = 2
"""Between two uses of the same weights the other copies bring this many times the last cache."""

_REPETITION = 1e-3
"""Seconds: short calls are timed so many at a time that neither the clock nor a launch shows."""
_MIN_ROUNDS, _MAX_ROUNDS = 7, 1000
_LOST = 3.0
"""After the first rounds one that is so many times slower than the fastest is known well enough."""
_STABLE, _WARM_SECONDS = 0.05, 0.3


@dataclass(frozen=True)
class Sample:
    """How long one call takes.

    Attributes:
        median, low, high: seconds: the median and the quartiles of the repetitions.
        repetitions: how many there were; one is a call, or as many short ones as a millisecond holds.
    """

    median: float
    low: float
    high: float
    repetitions: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Sample:
        """The sample of two or more repetitions."""
        low, median, high = statistics.quantiles(seconds, method="inclusive")
        return cls(median, low, high, len(seconds))

    @property
    def spread(self) -> float:
        """Distance of the quartiles as a part of the median."""
        return (self.high - self.low) / self.median

    @property
    def noisy(self) -> bool:
        """Whether the repetitions disagree so much that the median means little."""
        return self.spread > NOISY


def tie(a: Sample, b: Sample) -> bool:
    """Whether neither is faster: the medians differ by less than `TIE`, or the quartile ranges overlap."""
    faster, slower = sorted((a, b), key=lambda sample: sample.median)
    return slower.median - faster.median < TIE * faster.median or slower.low <= faster.high


def measure(
    calls: Mapping[str, Sequence[Call]],
    *,
    device: torch.device,
    graph_safe: Collection[str] = (),
    seconds: float = 0.3,
) -> Mapping[str, Sample]:
    """Times backends against each other in rounds; every other round goes through them in the opposite order.

    Args:
        calls: by name, what to call: one for each copy of the weights.
        device: where they run.
        graph_safe: names whose calls may be captured in a CUDA graph, as a decode step does.
        seconds: to spend on each name after the first rounds, which a slow one gets too.
    """
    clocks = {name: Clock.of(several, device, graph_safe=name in graph_safe) for name, several in calls.items()}
    patience = min(_WARM_SECONDS, 2 * seconds)
    counts = {name: math.ceil(_REPETITION / _warm(clock, patience)) for name, clock in clocks.items()}
    readings: dict[str, list[float]] = {name: [] for name in clocks}
    running, end = list(clocks), math.inf
    for number in range(_MAX_ROUNDS):
        if number == _MIN_ROUNDS:
            running = _contending(readings)
            end = time.perf_counter() + seconds * len(running)
        if time.perf_counter() > end:
            break
        for name in running if number % 2 == 0 else reversed(running):
            readings[name].append(clocks[name].seconds(counts[name]))
    return {name: Sample.of(several) for name, several in readings.items()}


def _warm(clock: Clock, patience: float) -> float:
    """Seconds per call, once every copy was used and two looks in a row agree, or after `patience` seconds."""
    end = time.perf_counter() + patience
    used, before = 0, math.inf
    while True:
        now = statistics.median(clock.seconds(1) for _ in range(3))
        used += 3
        if (used >= len(clock.calls) and abs(now - before) <= _STABLE * now) or time.perf_counter() > end:
            return now
        before = now


def _contending(readings: Mapping[str, Sequence[float]]) -> list[str]:
    medians = {name: statistics.median(several) for name, several in readings.items()}
    return [name for name, median in medians.items() if median <= _LOST * min(medians.values())]


def copies(touched: int, cache: int) -> int:
    """How many copies of the weights to cycle through so that none is found in the cache.

    Args:
        touched: weight bytes that one call reads.
        cache: bytes of the last cache.
    """
    return 1 + math.ceil(CACHES * cache / max(touched, 1))


@dataclass(frozen=True)
class Timed:
    """A backend timed on a case.

    Attributes:
        backend: its name.
        sample: how long a call takes.
        floor: what the hardware allows at least.
        layout_bytes: bytes its layout keeps beside the stored weights.
        copies: of the weights that it was timed over.
        cold: those were enough; False: memory was too small for them, and some weights were found in the cache.
    """

    backend: str
    sample: Sample
    floor: Floor
    layout_bytes: int
    copies: int
    cold: bool


def order(cases: Mapping[Case, Sequence[str]], device: Device, home: Path, seconds: float = 0.3) -> dict[str, Any]:
    """What `time_in_child` takes: the backends to time against each other on each case."""
    return {
        "cases": [{"case": case.to_json(), "backends": list(backends)} for case, backends in cases.items()],
        "device": device.key,
        "home": str(home),
        "seconds": seconds,
    }


def time_in_child(payload: Mapping[str, Any], results: Path) -> None:
    """For `isolate.run`: times an `order` and writes one file per case, in their order, for `read`."""
    torch.set_num_threads(env.read().threads)
    device, home = cpu() if payload["device"] == "cpu" else cuda(), Path(payload["home"])
    best = peaks(device, home)
    for number, entry in enumerate(payload["cases"]):
        case = Case.from_json(entry["case"])
        with torch.inference_mode():
            timed = time_case(case, entry["backends"], device.torch_device, best, payload["seconds"])
        if any(each.floor.share(each.sample.median) > 1 for each in timed):
            best = peaks(device, home)
            timed = tuple(replace(each, floor=each.floor.under(best, case.part.problem)) for each in timed)
        child.write(results, f"{number:06}.json", json.dumps([asdict(each) for each in timed]).encode())


def read(path: Path) -> tuple[Timed, ...]:
    """What `time_in_child` wrote of one case."""
    return tuple(
        Timed(**{**fields, "sample": Sample(**fields["sample"]), "floor": Floor(**fields["floor"])})
        for fields in json.loads(path.read_bytes())
    )


def time_case(
    case: Case, backends: Sequence[str], device: torch.device, peaks: Peaks, seconds: float = 0.3
) -> tuple[Timed, ...]:
    """Times backends, which must be right, against each other on one case."""
    inputs = build(case, device)
    least = floor(case.part.problem, case.tokens, inputs.routed if isinstance(inputs, ExpertInputs) else None, peaks)
    wanted = copies(least.weight_bytes, last_level_cache(device))
    memory = free_memory(device) // 2 // len(backends)
    rotations = {name: _rotation(case.part, name, inputs, wanted, memory) for name in backends}
    safe = {name for name, several in rotations.items() if several[0].graph_safe}
    calls = {name: _calls(several, case.tokens, device) for name, several in rotations.items()}
    samples = measure(calls, device=device, graph_safe=safe, seconds=seconds)
    return tuple(
        Timed(name, samples[name], least, several[0].layout_bytes, len(several), cold=len(several) >= wanted)
        for name, several in rotations.items()
    )


def _rotation(part: Part, backend: str, inputs: Inputs, wanted: int, memory: int) -> tuple[Candidate, ...]:
    """The backend bound to as many copies of the weights as are wanted and fit into `memory` bytes."""
    first = Candidate.bind(part, backend, inputs)
    held = sum(tensor.nbytes for tensor in weight_tensors(inputs)) + first.layout_bytes
    fit = memory // max(held, 1)
    others = range(1, max(1, min(wanted, fit)))
    return (first, *(Candidate.bind(part, backend, copied(inputs)) for _ in others))


def _calls(candidates: Sequence[Candidate], tokens: int, device: torch.device) -> tuple[Call, ...]:
    """They share what the layers of a model share: the workspace and the place of the output."""
    out, workspace = candidates[0].out_like(tokens), Workspace(device)
    return tuple(partial(candidate.run, out, workspace) for candidate in candidates)


def weight_tensors(inputs: Inputs) -> tuple[Tensor, ...]:
    """What a copy of the weights copies."""
    if isinstance(inputs, ExpertInputs):
        return (*inputs.weights.gate_up.tensors.values(), *inputs.weights.down.tensors.values())
    return tuple(inputs.matrix.tensors.values())


def copied(inputs: Inputs) -> Inputs:
    """The same tokens, and a copy of the weights."""
    if isinstance(inputs, ExpertInputs):
        weights = inputs.weights
        return replace(inputs, weights=replace(weights, gate_up=_cloned(weights.gate_up), down=_cloned(weights.down)))
    return replace(inputs, matrix=_cloned(inputs.matrix))


def _cloned(matrix: QuantMatrix) -> QuantMatrix:
    return matrix.with_tensors({name: tensor.clone() for name, tensor in matrix.tensors.items()}, matrix.shape)
