"""What this machine is: its key for backends to match, its memory, and how fast it reads memory when measured."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Device:
    """One device that experts can run on.

    Attributes:
        key: what backends match: "cpu", or an exact CUDA compute capability such as "9.0".
        name: the vendor's name for it.
        memory: bytes of memory it has.
        cores: CPU cores this process may use, or streaming multiprocessors.
    """

    key: str
    name: str
    memory: int
    cores: int

    @property
    def torch_device(self) -> torch.device:
        """The torch device."""
        return torch.device("cpu" if self.key == "cpu" else "cuda")


def cpu() -> Device:
    """The processor this process runs on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device("cpu", _processor_name(), memory, cores)


def free_memory() -> int:
    """Bytes of main memory this process can still take: what is available, within its control group's limit."""
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def cuda(index: int = 0) -> Device:
    """A CUDA device of this machine."""
    properties = torch.cuda.get_device_properties(index)
    key = f"{properties.major}.{properties.minor}"
    return Device(key, properties.name, properties.total_memory, properties.multi_processor_count)


def read_bandwidth(size: int = 1 << 29, seconds: float = 0.5) -> float:
    """Bytes per second that all CPU threads together read from memory: the best of several sums over `size` bytes."""
    buffer = torch.ones(size // 8, dtype=torch.int64)
    best = float("inf")
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        buffer.sum()
        best = min(best, time.perf_counter() - start)
    return size / best


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
