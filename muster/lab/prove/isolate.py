"""One function in one fresh process, from which nothing can reach the caller but files.

Three processes take part: the caller, a `guard` that watches and ends, and the `child` that computes.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from muster.errors import EnvironmentLackError

_HERE = Path(__file__).parent
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemory|MemoryError|allocate memory|bad_alloc", re.IGNORECASE)
_WHERE = re.compile(r'most recent call first\):\n  File "(?:.*/)?(.+)", line (\d+) in (.+)')


@dataclass(frozen=True)
class Limits:
    """What an isolated process may use.

    Attributes:
        seconds: longest time from the start to the first result, and from one result to the next.
        memory_bytes: of main memory, without the pages of files; None: any amount. The kernel refuses one process an
            allocation beyond it (RLIMIT_DATA, which CUDA's address space does not count towards), and all processes
            are killed once they really hold more together.
        output_bytes: how much of the end of stdout, and of stderr, is kept.
    """

    seconds: float = 60.0
    memory_bytes: int | None = None
    output_bytes: int = 1 << 14


@dataclass(frozen=True)
class Failure:
    """An exception that left the function.

    Attributes:
        type: name of its class.
        message: its text; what is no text is escaped.
        where: "file:line in function" of the raise.
    """

    type: str
    message: str
    where: str


@dataclass(frozen=True)
class Outcome:
    """How an isolated process ended.

    Attributes:
        results: directory of the files it wrote; gone when the `with` of `run` ends.
        seconds: from its start to its end.
        exit_code: None when it was killed.
        signal: the signal that killed it, None when it exited or a limit was broken.
        timed_out: it was killed for writing no result for `Limits.seconds`.
        out_of_memory: it was killed for holding more than `Limits.memory_bytes`, or said itself that memory ran out.
        failure: the exception that ended it, or that its guard was killed; or None.
        stdout_tail, stderr_tail: the end of what it printed; bytes that are no UTF-8 are escaped.
        peak_memory: bytes, the most that was seen.
        left_behind: processes it had started that were still alive at its end and were killed.
        immortal: processes that not even SIGKILL ended within seconds (a driver holds them).
    """

    results: Path
    seconds: float
    exit_code: int | None = None
    signal: int | None = None
    timed_out: bool = False
    out_of_memory: bool = False
    failure: Failure | None = None
    stdout_tail: str = ""
    stderr_tail: str = ""
    peak_memory: int = 0
    left_behind: int = 0
    immortal: int = 0

    @property
    def good(self) -> bool:
        """Whether the function returned."""
        return self.exit_code == 0 and self.failure is None

    def describe(self) -> str:
        """How it ended, in one line."""
        if self.failure is not None:
            text = f"{self.failure.type}: {self.failure.message} ({self.failure.where})"
        elif self.signal is not None:
            text = f"{signal.Signals(self.signal).name}{self._where()}"
        elif self.timed_out:
            text = f"no result in time{self._where()}"
        elif self.out_of_memory:
            text = f"killed while holding {self.peak_memory / 2**30:.1f} GiB"
        else:
            text = f"exit code {self.exit_code}"
        return " ".join(text.split())

    def _where(self) -> str:
        """Where the process was, if it could still tell; else the last line it printed to stderr."""
        if found := _WHERE.search(self.stderr_tail):
            return " at {}:{} in {}".format(*found.groups())
        lines = self.stderr_tail.split("\n")
        return next((f", after printing {line.strip()!r}" for line in reversed(lines) if line.strip()), "")


@contextmanager
def run(
    function: str,
    payload: Mapping[str, Any],
    limits: Limits,
    *,
    on_result: Callable[[Path, float], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Iterator[Outcome]:
    """Calls `function(payload, results)` in a fresh process and yields how it ended.

    The function hands over its results as files in the directory `results`, written by `child.write`. Whatever it
    does, at the end none of its processes is alive, and after the `with` its directory is gone.

    Args:
        function: "module:function".
        payload: what JSON can hold.
        limits: of time and memory.
        on_result: called in this process with each file and the seconds since the start, soon after it was written,
            while the other process works on.
        environment: the environment variables of the process; None: those of this one.

    Raises:
        EnvironmentLackError: this is not Linux.
    """
    if sys.platform != "linux":
        raise EnvironmentLackError("isolating a backend", found=sys.platform, expected="Linux")
    order = _order(function, payload, limits, os.environ if environment is None else environment)
    guard = subprocess.Popen(
        [sys.executable, "-I", "-S", str(_HERE / "guard.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    )
    assert guard.stdin is not None
    assert guard.stdout is not None
    directory = None
    try:
        guard.stdin.write(json.dumps(order).encode() + b"\n")
        guard.stdin.flush()
        directory = Path(json.loads(guard.stdout.readline())["directory"])
        yield _follow(guard.stdout, directory, on_result or (lambda *_: None))
    finally:
        guard.stdin.close()
        guard.stdout.close()
        guard.wait()
        if directory is not None:
            shutil.rmtree(directory, ignore_errors=True)


def _order(function: str, payload: Mapping[str, Any], limits: Limits, environment: Mapping[str, str]) -> dict[str, Any]:
    """What the guard reads: its own part, and under "child" the part it hands on."""
    return {
        "command": [sys.executable, "-P", str(_HERE / "child.py")],
        "environment": dict(environment),
        "seconds": limits.seconds,
        "memory_bytes": limits.memory_bytes,
        "output_bytes": limits.output_bytes,
        "child": {
            "path": sys.path,
            "function": function,
            "payload": payload,
            "memory_bytes": limits.memory_bytes,
        },
    }


def _follow(events: IO[bytes], directory: Path, on_result: Callable[[Path, float], None]) -> Outcome:
    seconds = 0.0
    for line in events:
        event = json.loads(line)
        if "end" in event:
            return _outcome(event["end"], directory)
        seconds = event["at"]
        on_result(directory / "results" / event["result"], seconds)
    # The kernel ends the process with its guard; of what that had started, some may be left.
    killed = Failure("GuardKilled", "something killed the process that watches it", "unknown")
    return Outcome(directory / "results", seconds, failure=killed)


def _outcome(end: dict[str, Any], directory: Path) -> Outcome:
    told = directory / "error.json"
    failure = Failure(**json.loads(told.read_bytes())) if told.exists() else None
    if failure is not None or end["signal"] == signal.SIGABRT:
        last_words = f"{failure.type}: {failure.message}" if failure else end["stderr_tail"]
        end["out_of_memory"] |= _OUT_OF_MEMORY.search(last_words) is not None
    return Outcome(results=directory / "results", failure=failure, **end)
