"""The threads that kernels run on: the OpenMP team that torch's own operations use.

A second pool would fight with torch's for the cores, because an OpenMP thread spins for a while after its work. So a
kernel asks the library that torch loaded, and finds torch's threads still awake.
"""

from __future__ import annotations

import ctypes
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


class Team:
    """Runs a kernel once on every thread; where torch has no GNU OpenMP, on this thread alone."""

    def __init__(self) -> None:
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
        if self._parallel is None or threads == 1:
            kernel(*self._reserved, 1, *arguments)
        else:
            slots = (ctypes.c_int64 * (RESERVED + len(arguments)))(*self._reserved, threads, *arguments)
            self._parallel(kernel.address, slots, threads, 0)


@cache
def team() -> Team:
    """The team of this process."""
    return Team()


def _address(function: object) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
    assert address is not None
    return address
