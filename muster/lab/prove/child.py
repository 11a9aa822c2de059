"""What runs in an isolated process, as a script started by `guard`: limits first, then one function of ours.

Standard library only until the function is imported, so that a limit holds for everything the function brings in.
"""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import json
import os
import resource
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import Any

_PR_SET_PDEATHSIG = 1


def write(results: Path, name: str, data: bytes = b"") -> None:
    """A result, whole or not there at all; also a sign of life, from which the limit of seconds counts anew."""
    partial = results / f".{name}"
    partial.write_bytes(data)
    partial.replace(results / name)


def main() -> None:
    """Runs the function of `payload.json` in the directory given; an exception is told in `error.json`, exit code 1."""
    directory = Path(sys.argv[1])
    order = json.loads((directory / "payload.json").read_text())
    sys.path[:] = order["path"]
    _limit(order["memory_bytes"])
    try:
        module, _, name = order["function"].partition(":")
        getattr(importlib.import_module(module), name)(order["payload"], directory / "results")
    except BaseException as error:
        write(directory, "error.json", json.dumps(_describe(error)).encode())
        with suppress(Exception):
            traceback.print_exc()
        _leave(1)
    _leave(0)


def _limit(memory_bytes: int | None) -> None:
    # A guard that was killed can end nothing; the kernel does it then.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory_bytes is not None:
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR2)


def _leave(code: int) -> None:
    """Ends at once: what a library does when the interpreter winds down says nothing about the function."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    os._exit(code)


def _describe(error: BaseException) -> dict[str, Any]:
    """The exception in JSON, however hostile its message."""
    try:
        message = str(error)
    except BaseException as second:
        message = f"its message raises {type(second).__name__}"
    frames = traceback.extract_tb(error.__traceback__)
    return {
        "type": type(error).__name__,
        "message": message.encode("utf-8", "backslashreplace").decode(),
        "where": f"{Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name}",
    }


if __name__ == "__main__":
    main()
