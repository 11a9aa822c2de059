"""How fast this device reads memory: the denominator of every floor, measured with a loop that only reads."""

from __future__ import annotations

import importlib.util
import itertools
import mmap
import time
from collections.abc import Callable
from functools import cache, reduce
from operator import xor

import torch
from torch import Tensor

from muster import native
from muster.device import last_level_cache
from muster.lab.measure.clock import between_events
from muster.native import team
from muster.native.jit import I64, Emitter, Kernel, Target, host
from muster.native.team import Team

_VECTOR = I64.x(4)
_ACCUMULATORS = 8
_BLOCK = _VECTOR.bytes * _ACCUMULATORS
_STREAMS = 2
"""Places that a thread reads from in turn: with one it is 7% slower (55 against 59 GB/s on two Zen 4 cores)."""
_HUGE_PAGE = 1 << 21
_READS = 8


def read_bandwidth(device: torch.device, seconds: float = 0.5) -> float:
    """Bytes per second that the whole device reads from a buffer much larger than its caches.

    It is the best of many readings, as whatever else the machine does can only make one worse; on a CPU they are short,
    so that some fall between two turns of another program. There every thread xors its own part, and on a GPU every
    program; without a compiler for kernels torch reduces the buffer (on an H200 2% slower, 4.45 against 4.53 TB/s).
    """
    read = _gpu_reading(device) if device.type == "cuda" else _cpu_reading(device)
    read()
    readings = [read()]
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        readings.append(read())
    return max(readings)


def _cpu_reading(device: torch.device) -> Callable[[], float]:
    """Bytes per second over the next piece of a buffer of eight times the last cache; a piece takes a millisecond."""
    size = max(8 * last_level_cache(device), 1 << 27) // _HUGE_PAGE * _HUGE_PAGE
    pieces = itertools.cycle(_pages(size).chunk(8))
    compiled = native.available()
    alone = itertools.cycle((False, True))

    def reading() -> float:
        # The team rests while cores are shared; a new one has not noticed yet. One thread is never kept waiting.
        piece, fresh, single = next(pieces), Team(), next(alone)
        start = time.perf_counter()
        if compiled:
            xor_of_all(piece, fresh, alone=single)
        else:
            piece.sum()
        return piece.nbytes / (time.perf_counter() - start)

    return reading


def _pages(size: int) -> Tensor:
    """int64 `[size / 8]`, in huge pages where the system gives them: looking up small ones takes time."""
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int64).fill_(1)


def xor_of_all(buffer: Tensor, readers: Team, *, alone: bool = False) -> int:
    """The xor of an int64 tensor: the readers (`alone`: this thread) take its whole blocks, this thread the rest."""
    blocks = buffer.nbytes // (_BLOCK * _STREAMS)
    sums = torch.zeros(torch.get_num_threads(), _VECTOR.lanes, dtype=torch.int64)
    readers.run(xor_kernel(host()), (buffer.data_ptr(), blocks, sums.data_ptr()), alone=alone)
    rest = buffer[blocks * _STREAMS * _BLOCK // buffer.itemsize :]
    return reduce(xor, (*sums.flatten().tolist(), *rest.tolist()), 0)


@cache
def xor_kernel(target: Target) -> Kernel:
    """Each thread xors its share of the blocks of each of `_STREAMS` equal parts of the buffer.

    Arguments: address of the buffer, blocks in a part, address of one vector per thread for the results.
    """
    e = Emitter("read", target)
    thread, threads = team.member(e)
    buffer, blocks, sums = (e.argument(team.RESERVED + slot) for slot in range(3))
    parts = [buffer + blocks * (part * _BLOCK) for part in range(_STREAMS)]
    totals = [[e.variable(e.constant(_VECTOR, 0)) for _ in range(_ACCUMULATORS)] for _ in parts]
    with e.loop(thread * blocks // threads, (thread + 1) * blocks // threads) as block:
        for part, accumulators in zip(parts, totals, strict=True):
            for number, total in enumerate(accumulators):
                total.set(total.get() ^ e.load(_VECTOR, part + block * _BLOCK, number * _VECTOR.bytes))
    together = reduce(xor, (total.get() for accumulators in totals for total in accumulators))
    e.store(together, sums + thread * _VECTOR.bytes)
    return e.compile()


def _gpu_reading(device: torch.device) -> Callable[[], float]:
    """Bytes per second of several reads of 4 GiB in a row: only the first waits for its launch."""
    words = torch.empty(1 << 30, dtype=torch.int32, device=device).random_()
    read = _read_by_triton() if importlib.util.find_spec("triton") else _read_by_torch
    return lambda: _READS * words.nbytes / between_events(lambda: [read(words) for _ in range(_READS)])


def _read_by_triton() -> Callable[[Tensor], object]:
    from muster.lab.measure import streaming

    return streaming.read


def _read_by_torch(words: Tensor) -> Tensor:
    return torch.amax(words.view(-1, 1 << 16), dim=1)
