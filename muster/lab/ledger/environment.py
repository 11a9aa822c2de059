"""What a verdict or a time depends on: this machine, its libraries, the judge, and the source of the backend.

A verdict is about numbers that one binary made on one machine. When anything that could change those numbers changes,
the verdict is history: kept and shown, but it no longer counts.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from muster import env, native
from muster.contract import Package
from muster.device import Device
from muster.errors import UsageError
from muster.gemm.registry import linears
from muster.lab.ledger import source
from muster.moe.kernels import tuning
from muster.moe.registry import backends

NOTED = frozenset({"muster", "python", "system"})
"""Recorded to explain a difference, but not a reason: what Muster computes with has keys of its own."""

_NONE = "none"


def current(device: Device, role: str, backend: str, home: Path | None = None) -> Mapping[str, str]:
    """What evidence about a backend on `device` depends on, by name, and what is only noted (`NOTED`).

    These are `device` and `key`, on a CPU `instructions` and `threads`, on a GPU `driver`, `cuda` and `triton`; then
    `torch`, `package NAME` for each package that the backend declares, `tiles` where it takes them from a table (a
    digest of that, or "none"), and `judge`, the source of what decides.

    Args:
        device: where.
        role: what the backend computes.
        backend: its name.
        home: where the user's tuning tables lie; None: MUSTER_HOME.
    """
    packages, kernels = _packages(role, backend), _tiled(role, backend)
    return {
        "device": device.name,
        "key": device.key,
        **(_gpu() if device.key != "cpu" else _cpu(kernels=native.REQUIREMENT in packages)),
        "torch": torch.__version__,
        **{f"package {package.name}": _version(package.name) for package in packages},
        **({"tiles": tuning.digest(kernels, device.name, home or env.read().home)} if kernels else {}),
        "judge": _judge(),
        "muster": _version("muster-moe"),
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}",
    }


@cache
def source_hash(role: str, backend: str) -> str:
    """sha256 of the source of a backend and of the modules of ours that it computes with, once per process.

    Raises:
        UsageError: no such backend.
    """
    return source.of_backend(role, backend)


def differences(then: Mapping[str, str], now: Mapping[str, str]) -> tuple[str, ...]:
    """Why what was found in one environment does not count in another, a line each; empty when it does.

    Another device is reason enough: the rest of another machine is not compared with this one.
    """
    names = [name for name in dict.fromkeys((*then, *now)) if name not in NOTED]
    different = [name for name in names if then.get(name, _NONE) != now.get(name, _NONE)]
    device = [name for name in ("device", "key") if name in different]
    return tuple(
        f"{name.removeprefix('package ')} {then.get(name, _NONE)} then, {now.get(name, _NONE)} now"
        for name in device[:1] or different
    )


@cache
def _judge() -> str:
    return source.judge()[:12]


def _cpu(*, kernels: bool) -> Mapping[str, str]:
    """What torch's own loops use, and what a backend's compiled `kernels` are made for."""
    instructions = torch.backends.cpu.get_cpu_capability().lower()
    if kernels and native.available():
        from muster.native.jit import host

        instructions += f", kernels for {host().name}{' with avx2' if host().avx2 else ''}"
    return {"instructions": instructions, "threads": str(env.read().threads)}


@cache
def _gpu() -> Mapping[str, str]:
    return {"driver": _driver(), "cuda": torch.version.cuda or _NONE, "triton": _version("triton")}


def _driver() -> str:
    """The kernel driver's version, from NVML or from the driver's own file in /proc."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return _driver_of_proc(Path("/proc/driver/nvidia/version"))
    text = ctypes.create_string_buffer(96)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, len(text)):
        return _driver_of_proc(Path("/proc/driver/nvidia/version"))
    library.nvmlShutdown()
    return text.value.decode()


def _driver_of_proc(path: Path) -> str:
    first = path.read_text().splitlines()[0] if path.exists() else ""
    numbers = [word for word in first.split() if word[0].isdigit() and "." in word]
    return numbers[0] if numbers else "unknown"


def _packages(role: str, backend: str) -> tuple[Package, ...]:
    """What a backend declares to need; one that cannot even be imported declares nothing."""
    try:
        return linears().get(backend).facts.packages if role == "linears" else backends().get(backend).facts.packages
    except UsageError:
        return ()


def _tiled(role: str, backend: str) -> str:
    """Whose tile sizes in the tuning tables a backend runs with; empty where it does with none."""
    try:
        return "" if role == "linears" else backends().get(backend).facts.tiles
    except UsageError:
        return ""


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return _NONE
