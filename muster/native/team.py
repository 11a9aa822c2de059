"""The threads that kernels run on: the OpenMP team that torch's own operations use.

A second pool would fight with torch's for the cores, because an OpenMP thread spins for a while after its work. So a
kernel asks the library that torch loaded, and finds torch's threads still awake.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import torch

from muster.native.jit import I64, Emitter, Kernel, Value

RESERVED = 3
"""Argument slots the team fills: the addresses of `omp_get_thread_num` and `GOMP_barrier`, the thread count."""


def member(e: Emitter) -> tuple[Value, Value]:
    """Inside a kernel: this thread's number, and how many there are."""
    threads = e.argument(2)
    number = e.variable(e.constant(I64, 0))
    with e.when(threads.compare(">", 1)):
        number.set(e.extend(e.call(e.argument(0)), I64))
    return number.get(), threads


def barrier(e: Emitter, threads: Value) -> None:
    """Inside a kernel: waits until every thread is here."""
    with e.when(threads.compare(">", 1)):
        e.call(e.argument(1))


class Pace:
    """Whether the other threads keep up.

    When another program takes a core, every region waits at its barriers until that core is given back, milliseconds
    each time, and two threads are slower than one. Waiting threads spin, so a team that has its cores to itself uses
    all of their time, from one region to the next; one that lacks a good part of a core is sharing it.
    """

    WINDOW = 0.05
    """Seconds of regions close behind one another; the system counts other threads' time in ticks of up to 0.01."""
    GAP = 0.001
    """Seconds between two regions after which the threads may have gone to sleep."""
    LACK = 0.35
    """Cores' worth of time lacking: two programs that share a core get half of it each."""
    REST = 0.25
    """Seconds without the team after it lacked time; twice as long after each further try, up to the longest."""
    LONGEST_REST = 2.0

    def __init__(self) -> None:
        self._began = 0.0
        self._used = 0.0
        self._last = 0.0
        self._rest = self.REST
        self._until = 0.0

    def together(self, threads: int) -> bool:
        """Whether the region that begins now should run on all threads."""
        now = time.perf_counter()
        if now < self._until:
            return False
        if now - self._last > self.GAP:
            self._open(now)
        elif now - self._began > self.WINDOW:
            lack = threads - (time.process_time() - self._used) / (now - self._began)
            self._open(now)
            if lack > self.LACK:
                self._until = now + self._rest
                self._rest = min(2 * self._rest, self.LONGEST_REST)
                return False
            self._rest = self.REST
        return True

    def done(self) -> None:
        """A region on all threads has ended."""
        self._last = time.perf_counter()

    def _open(self, now: float) -> None:
        self._began, self._used = now, time.process_time()


class Team:
    """Runs a kernel once on every thread; where torch has no GNU OpenMP, on this thread alone.

    So it does for a while, too, when other programs keep the threads from running at the same time (`Pace`).
    """

    def __init__(self) -> None:
        self._pace = Pace()
        self._parallel: Callable[..., None] | None = None
        self._reserved = (0, 0)
        library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
        if library.exists():
            self._join(ctypes.CDLL(str(library)))

    def _join(self, library: ctypes.CDLL) -> None:
        names = ("GOMP_parallel", "omp_get_thread_num", "GOMP_barrier")
        if all(hasattr(library, name) for name in names):
            parallel, number, wait = (getattr(library, name) for name in names)
            parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
            parallel.restype = None
            self._parallel = parallel
            self._reserved = (_address(number), _address(wait))

    def run(self, kernel: Kernel, arguments: Sequence[int], *, alone: bool = False) -> None:
        """Calls the kernel on every thread (`alone`: on this one) and returns when all are done; the GIL is free."""
        threads = 1 if alone or self._parallel is None else torch.get_num_threads()
        if self._parallel is None or threads == 1 or not self._pace.together(threads):
            kernel(*self._reserved, 1, *arguments)
        else:
            slots = (ctypes.c_int64 * (RESERVED + len(arguments)))(*self._reserved, threads, *arguments)
            self._parallel(kernel.address, slots, threads, 0)
            self._pace.done()


@cache
def team() -> Team:
    """The team of this process."""
    return Team()


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address
