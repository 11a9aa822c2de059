"""The supervisor of one isolated process, run as a script by `isolate`: standard library only, to start at once.

It is a process of its own for three reasons: it goes on watching while the caller is busy judging; as a subreaper it
inherits every orphan that the watched process leaves, whatever session or group that moved to; and when the caller
dies, even by SIGKILL, it still ends everything and removes the directory.

Standard input: one line of JSON (see `isolate.run`), then nothing; its end means "stop now and clean up".
Standard output: one line of JSON per event, `{"result": NAME, "at": SECONDS}` for every file the process finishes and
at last `{"end": {...}}` with the fields of `isolate.Outcome`. The first line is `{"directory": PATH}`.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

TICK = 0.1
"""Seconds between looks at the memory and at the results; everything else wakes the guard by itself."""
PATIENCE = 10.0
"""Seconds to wait for killed processes to be gone; one that a driver holds may never be."""
WHERE = signal.SIGUSR2
"""Makes the process print where it is (see `child`) before it is killed for its silence."""

_PR_SET_CHILD_SUBREAPER = 36


class Guard:
    """One watched process, from its start until nothing of it is left.

    Args:
        order: what the caller wants (see `isolate.run`).
        directory: private; holds `payload.json`, `error.json` and `results/`.
    """

    def __init__(self, order: dict[str, Any], directory: Path) -> None:
        self._order = order
        self._results = directory / "results"
        self._results.mkdir()
        self._announced: set[str] = set()
        self._peak = 0
        self._start = self._sign_of_life = time.monotonic()
        payload = directory / "payload.json"
        payload.write_text(json.dumps(order["child"]))
        self._process = subprocess.Popen(
            [*order["command"], str(directory)],
            env=order["environment"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._outputs = {self._process.stdout.fileno(): bytearray(), self._process.stderr.fileno(): bytearray()}
        for output in self._outputs:
            os.set_blocking(output, False)

    def watch(self) -> dict[str, Any] | None:
        """Waits for the end, or brings it about where a limit is broken; None when the caller has gone."""
        reason = self._wait()
        if reason == "silence":
            self._ask_where()
        exit_code = self._kill()
        left_behind, immortal = _kill_descendants(time.monotonic() + PATIENCE)
        if reason == "abandoned":
            return None
        self._drain()
        self._announce()
        stdout, stderr = (bytes(tail).decode("utf-8", "backslashreplace") for tail in self._outputs.values())
        ended = reason == "end"
        return {
            "seconds": time.monotonic() - self._start,
            "exit_code": exit_code if ended and exit_code is not None and exit_code >= 0 else None,
            "signal": -exit_code if ended and exit_code is not None and exit_code < 0 else None,
            "timed_out": reason == "silence",
            "out_of_memory": reason == "memory",
            "stdout_tail": stdout,
            "stderr_tail": stderr,
            "peak_memory": self._peak,
            "left_behind": left_behind,
            "immortal": immortal,
        }

    def _wait(self) -> str:
        """Why to stop: "end", "silence", "memory" or "abandoned"."""
        child_ended, waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(waker)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        poll = select.poll()
        for descriptor in (0, child_ended, *self._outputs):
            poll.register(descriptor, select.POLLIN)
        next_look = 0.0
        while True:
            ready = {descriptor for descriptor, _ in poll.poll(TICK * 1000)}
            for output in self._drain() & ready:
                poll.unregister(output)
            if self._process.poll() is not None:
                return "end"
            if 0 in ready:
                return "abandoned"
            if child_ended in ready:
                os.read(child_ended, 1 << 10)
            now = time.monotonic()
            if now < next_look:
                continue
            next_look = now + TICK
            self._announce()
            if now - self._sign_of_life > self._order["seconds"]:
                return "silence"
            memory = sum(_resident_bytes(pid) for pid in _descendants())
            self._peak = max(self._peak, memory)
            if self._order["memory_bytes"] is not None and memory > self._order["memory_bytes"]:
                return "memory"

    def _announce(self) -> None:
        names = {entry.name for entry in os.scandir(self._results) if not entry.name.startswith(".")}
        for name in sorted(names - self._announced):
            self._sign_of_life = time.monotonic()
            tell({"result": name, "at": self._sign_of_life - self._start})
        self._announced |= names

    def _drain(self) -> set[int]:
        """Reads what was printed and keeps the end of it; returns the outputs that are closed."""
        closed = set()
        for output, tail in self._outputs.items():
            try:
                chunk = os.read(output, 1 << 20)
            except BlockingIOError:
                continue
            if not chunk:
                closed.add(output)
            tail += chunk
            del tail[: -self._order["output_bytes"]]
        return closed

    def _ask_where(self) -> None:
        self._process.send_signal(WHERE)
        time.sleep(TICK)
        self._drain()

    def _kill(self) -> int | None:
        """Its exit code as `subprocess` has it; None when even SIGKILL does not end it."""
        if self._process.poll() is None:
            self._process.kill()
        try:
            return self._process.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            return None


def tell(event: dict[str, Any]) -> None:
    """One event to the caller."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def _descendants() -> Iterator[int]:
    """Every living process that comes from this one."""
    children: dict[int, list[int]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            state, parent = _state_and_parent(entry.name)
            if state not in ("Z", "X"):
                children.setdefault(parent, []).append(int(entry.name))
    ancestors = [os.getpid()]
    while ancestors:
        found = children.get(ancestors.pop(), [])
        yield from found
        ancestors += found


def _state_and_parent(pid: str) -> tuple[str, int]:
    try:
        text = Path("/proc", pid, "stat").read_bytes()
    except OSError:
        return "X", 0
    # The name in brackets before these fields may hold anything.
    state, parent = text[text.rindex(b")") + 1 :].split()[:2]
    return state.decode(), int(parent)


def _resident_bytes(pid: int) -> int:
    """Anonymous and shared memory: not the pages of files, which the kernel can drop."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(errors="replace").splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(("RssAnon:", "RssShmem:")))


def _kill_descendants(deadline: float) -> tuple[int, int]:
    """How many processes were killed, and how many of them are still there at the deadline."""
    killed: set[int] = set()
    while alive := set(_descendants()):
        for pid in alive:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        killed |= alive
        if time.monotonic() > deadline:
            break
        time.sleep(0.005)
        _reap()
    return len(killed), len(alive)


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


def _read_order() -> dict[str, Any]:
    line = bytearray()
    while not line.endswith(b"\n"):
        chunk = os.read(0, 1 << 16)
        if not chunk:
            sys.exit(0)
        line += chunk
    order: dict[str, Any] = json.loads(line)
    return order


def main() -> None:
    """Does one order and stays until the caller has taken the results."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    order = _read_order()
    directory = Path(tempfile.mkdtemp(prefix="muster-isolated-"))
    try:
        tell({"directory": str(directory)})
        end = Guard(order, directory).watch()
        if end is not None:
            tell({"end": end})
            os.read(0, 1)
    except BrokenPipeError:
        _kill_descendants(time.monotonic() + PATIENCE)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


if __name__ == "__main__":
    main()
