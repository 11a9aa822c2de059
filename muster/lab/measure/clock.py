"""Clocks for the calls of one backend: the host's, a GPU's events, and events around a CUDA graph."""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

Call = Callable[[], None]


class Clock(ABC):
    """Times calls in turn: each reading goes on with the call after the last one.

    Attributes:
        calls: the same work, each on its own copy of the weights.
    """

    def __init__(self, calls: Sequence[Call]) -> None:
        self.calls = tuple(calls)
        self._turns = itertools.cycle(self.calls)

    @staticmethod
    def of(calls: Sequence[Call], device: torch.device, *, graph_safe: bool) -> Clock:
        """The clock that suits the device; a GPU replays a graph of the calls where they may be captured."""
        if device.type == "cpu":
            return _HostClock(calls)
        return _GraphClock(calls) if graph_safe else _EventClock(calls)

    @abstractmethod
    def seconds(self, count: int) -> float:
        """Seconds per call of the next `count` calls, or of a few more."""


class _HostClock(Clock):
    def seconds(self, count: int) -> float:
        batch = tuple(itertools.islice(self._turns, count))
        start = time.perf_counter()
        for call in batch:
            call()
        return (time.perf_counter() - start) / count


class _EventClock(Clock):
    def seconds(self, count: int) -> float:
        batch = tuple(itertools.islice(self._turns, count))
        return between_events(lambda: [call() for call in batch]) / count


class _GraphClock(Clock):
    """A graph holds whole passes over the calls, so every replay goes through all copies."""

    def __init__(self, calls: Sequence[Call]) -> None:
        super().__init__(calls)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}

    def seconds(self, count: int) -> float:
        passes = math.ceil(count / len(self.calls))
        if passes not in self._graphs:
            self._graphs[passes] = self._capture(passes)
        return between_events(self._graphs[passes].replay) / (passes * len(self.calls))

    def _capture(self, passes: int) -> torch.cuda.CUDAGraph:
        """The calls run once before, so that whatever they allocate or compile is there."""
        for call in self.calls:
            call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in self.calls * passes:
                call()
        graph.replay()
        return graph


def between_events(enqueue: Callable[[], object]) -> float:
    """Seconds that a GPU spends on what is enqueued."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    enqueue()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3
