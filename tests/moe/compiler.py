"""NVIDIA's run-time compiler, as the kernels in CUDA are compiled by; it needs no GPU."""

from __future__ import annotations

import ctypes
import ctypes.util
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from muster.moe.kernels.nvrtc import options


@dataclass(frozen=True)
class Built:
    """What was made of a source, and the compiler's words about it."""

    ptx: str
    said: str

    def numbers(self, pattern: str) -> list[int]:
        """The numbers in what was said."""
        return [int(number) for number in re.findall(pattern, self.said)]

    @property
    def stack(self) -> int:
        """Bytes of memory in which a thread keeps what registers could not hold."""
        found = self.numbers(r"(\d+) bytes stack frame")
        assert found, self.said
        return max(found)


def build(source: str, target: str, constants: Mapping[str, Any]) -> Built:
    """The source for an architecture such as 90a; skips the test where there is no compiler.

    Raises:
        AssertionError: what the compiler has against it.
    """
    compiler = _compiler()
    if compiler is None:
        pytest.skip("no libnvrtc: pip install nvidia-cuda-nvrtc")
    flags = [*options(constants), f"--gpu-architecture=sm_{target}", "--ptxas-options=-v"]
    program = ctypes.c_void_p()
    assert compiler.nvrtcCreateProgram(ctypes.byref(program), source.encode(), None, 0, None, None) == 0
    given = (ctypes.c_char_p * len(flags))(*(flag.encode() for flag in flags))
    status = compiler.nvrtcCompileProgram(program, len(flags), given)
    said = _text(program, compiler.nvrtcGetProgramLogSize, compiler.nvrtcGetProgramLog)
    assert status == 0, said
    ptx = _text(program, compiler.nvrtcGetPTXSize, compiler.nvrtcGetPTX)
    compiler.nvrtcDestroyProgram(ctypes.byref(program))
    return Built(ptx, said)


@cache
def _compiler() -> ctypes.CDLL | None:
    """The newest that Python packages bring, or else the system's."""
    packed = [path for entry in sys.path for path in sorted(Path(entry).glob("nvidia/*/lib/libnvrtc.so.*"))]
    if not packed:
        found = ctypes.util.find_library("nvrtc")
        return None if found is None else ctypes.CDLL(found)
    for beside in packed[-1].parent.glob("libnvrtc-builtins.so*"):
        ctypes.CDLL(str(beside))  # the compiler opens it by its name alone
    return ctypes.CDLL(str(packed[-1]))


def _text(program: ctypes.c_void_p, size_of: Any, read: Any) -> str:
    size = ctypes.c_size_t()
    assert size_of(program, ctypes.byref(size)) == 0
    text = ctypes.create_string_buffer(size.value)
    assert read(program, text) == 0
    return text.value.decode()
