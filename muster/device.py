"""What this machine is: its key for backends to match, its memory and its caches."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import torch

from muster import env
from muster.errors import EnvironmentLackError, UsageError

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
)
"""Dtypes of activations by the names that problems call them."""


@dataclass(frozen=True)
class Device:
    """One device that experts can run on.

    Attributes:
        key: what backends match: "cpu", or an exact CUDA compute capability such as "9.0".
        name: the vendor's name for it.
        memory: bytes of memory it has.
        cores: CPU cores this process may use, or streaming multiprocessors.
        present: it is in this machine; False: one that is only talked about, and nobody knows what is installed there.
    """

    key: str
    name: str
    memory: int
    cores: int
    present: bool = True

    @property
    def activations(self) -> Literal["f32", "bf16"]:
        """The dtype that models compute in there, by its name in `DTYPES`."""
        return "f32" if self.key == "cpu" else "bf16"

    @property
    def torch_device(self) -> torch.device:
        """The torch device."""
        return torch.device("cpu" if self.key == "cpu" else "cuda")


AMPERE = frozenset({"8.0", "8.6"})
ADA = frozenset({"8.9"})
HOPPER = frozenset({"9.0"})
BLACKWELL = frozenset({"10.0", "10.3"})
THOR = frozenset({"11.0"})
BLACKWELL_RTX = frozenset({"12.0", "12.1"})
"""Compute capabilities by generation. Those of Blackwell's data-centre and graphics chips share no tensor-core
instructions: a kernel for one says nothing about the other."""

CDNA = frozenset({"gfx942", "gfx950"})
"""AMD's MI300 and MI350 series."""

COMPUTE_CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3", "11.0", "12.0", "12.1")
"""Those that backends declare facts for."""


def elsewhere(key: str) -> Device:
    """A device of that compute capability in no particular machine; its memory and cores are not known and 0.

    Raises:
        UsageError: not one of `COMPUTE_CAPABILITIES`.
    """
    if key not in COMPUTE_CAPABILITIES:
        raise UsageError("compute capability", found=repr(key), expected=f"one of {', '.join(COMPUTE_CAPABILITIES)}")
    return Device(key, f"compute capability {key}", 0, 0, present=False)


def cpu() -> Device:
    """The processor this process runs on."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return Device("cpu", _processor_name(), memory, cores)


def here() -> Device:
    """Where models run in this process: the first GPU when there is one, unless MUSTER_DEVICE says otherwise.

    Raises:
        EnvironmentLackError: it asks for a GPU, and torch sees none.
    """
    wanted = env.read().device
    if wanted == "cpu" or (wanted == "auto" and not torch.cuda.is_available()):
        return cpu()
    if not torch.cuda.is_available():
        raise EnvironmentLackError(
            "MUSTER_DEVICE=cuda", found="no GPU that torch can use", expected="one", hint="see nvidia-smi; or unset it"
        )
    return cuda()


def free_memory(device: torch.device | None = None) -> int:
    """Bytes that this process can still take: of a GPU, or of main memory within its control group's limit."""
    if device is not None and device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    info = Path("/proc/meminfo")
    if info.exists():
        fields = dict(line.split(":", 1) for line in info.read_text().splitlines())
        free = int(fields["MemAvailable"].split()[0]) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.exists() and used.exists() and (text := limit.read_text().strip()) != "max":
        free = min(free, max(0, int(text) - int(used.read_text())))
    return free


def release_memory() -> None:
    """Gives back what this process keeps of a GPU's memory for later, so that the next process can have it."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def cuda(index: int = 0) -> Device:
    """A CUDA device of this machine."""
    properties = torch.cuda.get_device_properties(index)
    key = f"{properties.major}.{properties.minor}"
    return Device(key, properties.name, properties.total_memory, properties.multi_processor_count)


def shared_memory(index: int = 0) -> int:
    """Bytes of shared memory that one program of a CUDA device may have."""
    return int(torch.cuda.get_device_properties(index).shared_memory_per_block_optin)  # type: ignore[attr-defined]


def last_level_cache(device: torch.device) -> int:
    """Bytes of the last cache before memory: of every core this process may use together, or of the GPU.

    A virtual machine may show a part of what the processor has. 0 where the system does not say.
    """
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    caches: dict[tuple[int, str], int] = {}
    for index in (found for core in cores for found in Path(f"/sys/devices/system/cpu/cpu{core}/cache").glob("index*")):
        level, shared_by, size = ((index / name).read_text().strip() for name in ("level", "shared_cpu_list", "size"))
        caches[int(level), shared_by] = int(size.removesuffix("K")) * 1024
    last = max((level for level, _ in caches), default=0)
    return sum(size for (level, _), size in caches.items() if level == last)


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
