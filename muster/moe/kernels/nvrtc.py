"""CUDA C++ compiled for the device at hand by torch's NVRTC, and launched so that the kernels of a chain overlap."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from muster.errors import EnvironmentLackError

_PROGRAMMATIC_STREAM_SERIALIZATION = 6
"""`CUlaunchAttributeID`: the kernel may start while the one before it still runs, and waits for it by itself."""


_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8
"""`CUfunction_attribute`."""

Argument = ctypes.Structure | ctypes.c_int
"""What a kernel takes beside tensors."""


class _Attribute(ctypes.Structure):
    _fields_ = (("id", ctypes.c_int), ("pad", ctypes.c_char * 4), ("value", ctypes.c_int * 16))


class _Config(ctypes.Structure):
    """`CUlaunchConfig`."""

    _fields_ = (
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


@dataclass(frozen=True, eq=False)
class Kernel:
    """A loaded kernel.

    Attributes:
        name: as in the source.
        function: `CUfunction`.
        shared: bytes of shared memory that a program gets beyond what the source declares.
        overlaps: the device can start it early.
    """

    name: str
    function: Any
    shared: int
    overlaps: bool

    @staticmethod
    def of(source: str, name: str, flags: Sequence[str], *, shared: int = 0, target: str | None = None) -> Kernel:
        """Compiles it for the current device.

        Args:
            source: CUDA C++.
            name: of the kernel, which is `extern "C"`.
            flags: for the compiler.
            shared: bytes of shared memory that a program needs beyond what the source declares.
            target: the architecture without `sm_`; None: the device's.

        Raises:
            RuntimeError: what the compiler says.
        """
        made = torch.cuda._compile_kernel(source, name, target, nvcc_options=list(flags))
        if shared:
            _checked(_driver().cuFuncSetAttribute(made.func, _MAX_DYNAMIC_SHARED_SIZE_BYTES, shared), name)
        return Kernel(name, made.func, shared, torch.cuda.get_device_capability() >= (9, 0))

    def launch(
        self, grid: tuple[int, int], threads: int, given: Sequence[Tensor | Argument], *, early: bool = False
    ) -> None:
        """Puts it on the current stream.

        Args:
            grid: programs, across and down.
            threads: of a program.
            given: the arguments; of a tensor its address.
            early: it may start before the kernel in front of it is over; it must wait for what it reads.
        """
        values = [ctypes.c_void_p(each.data_ptr()) if isinstance(each, Tensor) else each for each in given]
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        attribute = _Attribute(_PROGRAMMATIC_STREAM_SERIALIZATION)
        attribute.value[0] = 1
        config = _Config(
            grid=(*grid, 1),
            block=(threads, 1, 1),
            shared=self.shared,
            stream=torch.cuda.current_stream().cuda_stream,
            attributes=ctypes.pointer(attribute),
            count=int(early and self.overlaps),
        )
        _checked(_driver().cuLaunchKernelEx(ctypes.byref(config), self.function, arguments, None), self.name)


def options(constants: Mapping[str, Any]) -> tuple[str, ...]:
    """Constants on the compiler's command line."""
    return ("--std=c++17", *(f"-D{name}={int(v) if isinstance(v, bool) else v}" for name, v in constants.items()))


def _checked(status: int, name: str) -> None:
    if status:
        raise EnvironmentLackError(f"launch of {name}", found=f"CUDA error {status}", expected="success")


@cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
