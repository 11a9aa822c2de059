"""What this device was measured to do at most: the two rates that floors divide by, kept in MUSTER_HOME."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from muster.device import DTYPES, Device
from muster.formats.spec import Format
from muster.lab.measure.bandwidth import read_bandwidth
from muster.lab.measure.clock import between_events

FILE = "peaks.json"
_SIZE = {"cpu": 512, "cuda": 8192}
"""Rows and columns of the products: memory does not matter, and on a CPU one is over before another program's turn."""
_DTYPES = {"cpu": ("f32",), "cuda": ("f32", "bf16", "f16")}
"""What models compute in there."""
_FIRST_LOOK, _LOOK = 1.0, 0.2
"""Seconds for each rate."""
_FP8_SINCE = (8, 9)


@dataclass(frozen=True)
class Peaks:
    """Measured rates of one device.

    Attributes:
        read_bandwidth: bytes per second read from memory.
        operations: operations per second of a large product, by element type: "f32", "bf16", "f16", "fp8".
    """

    read_bandwidth: float
    operations: Mapping[str, float]

    def rate(self, weights: Format, dtype: str) -> float | None:
        """The most operations per second for such weights and activations; None where nobody measured what counts.

        Quantised weights may be multiplied by activations rounded to fp8. Products of two fp4 matrices, which newer
        GPUs have, are not measured.
        """
        usable = {dtype, "fp8"} if weights.quantised and dtype != "f32" else {dtype}
        return max((rate for name, rate in self.operations.items() if name in usable), default=None)

    def over(self, other: Peaks) -> Peaks:
        """The better of each."""
        names = {*self.operations, *other.operations}
        best = {name: max(self.operations.get(name, 0.0), other.operations.get(name, 0.0)) for name in sorted(names)}
        return Peaks(max(self.read_bandwidth, other.read_bandwidth), best)


def peaks(device: Device, home: Path) -> Peaks:
    """The best that was ever measured on this machine as it is, a look at it now included (a second or two).

    Whatever else runs can only make a reading worse, so the best one stands; it is kept in `home` with the machine it
    is of, and a machine that differs (device, threads, torch, CUDA) starts anew.

    Args:
        device: the processor or a GPU of this machine.
        home: MUSTER_HOME.
    """
    machine, entries = _machine(device), _stored(home / FILE)
    if machine in entries:
        best = measured(device.torch_device, _LOOK).over(Peaks(**entries[machine]))
    else:
        best = measured(device.torch_device, _FIRST_LOOK)
    _store(home / FILE, {**entries, machine: asdict(best)})
    return best


def measured(device: torch.device, seconds: float = 0.3) -> Peaks:
    """Measures every rate now."""
    return Peaks(read_bandwidth(device, seconds), product_rates(device, seconds))


def product_rates(device: torch.device, seconds: float) -> Mapping[str, float]:
    """Operations per second of torch's product of two large matrices, by element type, the best of several."""
    size = _SIZE[device.type]
    products = {name: _product(size, DTYPES[name], device) for name in _DTYPES[device.type]}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= _FP8_SINCE:
        products["fp8"] = _fp8_product(size, device)
    return {name: 2 * size**3 / _best(product, device, seconds) for name, product in products.items()}


def _product(size: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return lambda: torch.mm(a, b, out=out)


def _fp8_product(size: int, device: torch.device) -> Callable[[], object]:
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16)


def _best(product: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The least seconds of one; on a CPU every other is of one thread, which shared cores do not keep waiting."""
    threads = torch.get_num_threads()
    readings: list[float] = []
    product()
    end = time.perf_counter() + seconds
    try:
        while not readings or time.perf_counter() < end:
            torch.set_num_threads(1 if len(readings) % 2 else threads)
            readings.append(_seconds(product, device))
    finally:
        torch.set_num_threads(threads)
    return min(readings)


def _seconds(product: Callable[[], object], device: torch.device) -> float:
    if device.type == "cuda":
        return between_events(product)
    start = time.perf_counter()
    product()
    return time.perf_counter() - start


def _machine(device: Device) -> str:
    """What the rates depend on."""
    runs_on = f"{torch.get_num_threads()} threads" if device.key == "cpu" else f"CUDA {torch.version.cuda}"
    return f"{device.name} ({device.key}), {device.cores} cores, torch {torch.__version__}, {runs_on}"


def _stored(path: Path) -> Mapping[str, Any]:
    """What is kept, by machine; a file that cannot be read is as good as none."""
    try:
        entries = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return entries if isinstance(entries, dict) else {}


def _store(path: Path, entries: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(entries, indent=2) + "\n")
    partial.replace(path)
