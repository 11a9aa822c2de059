"""What a process can do to those around it; each takes the arguments of an isolated function and needs no torch."""

import ctypes
import mmap
import os
import signal
import sys
import time

from muster.lab.prove.child import write


def nothing(payload, results):
    pass


def echo(payload, results):
    write(results, "echo", repr(payload).encode())


def segfault(payload, results):
    ctypes.string_at(0)


def abort(payload, results):
    os.abort()


def endless(payload, results):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    while True:
        pass


def exit_quietly(payload, results):
    os._exit(0)


def exit_politely(payload, results):
    sys.exit(0)


def raise_garbage(payload, results):
    raise RuntimeError(b"\xff\xfe caf\xe9".decode("utf-8", "surrogateescape") + "\ud800\n\nsecond line")


def raise_unprintable(payload, results):
    class UnprintableError(Exception):
        def __str__(self):
            raise ValueError("no text")

    raise UnprintableError


def allocate(payload, results):
    """More than any limit of these tests, in one piece."""
    return bytearray(1 << 40)


def share(payload, results):
    """More and more shared memory, which no limit of a process counts."""
    block = 1 << 25
    kept = []
    while True:
        kept.append(mmap.mmap(-1, block))
        kept[-1].write(bytes(block))


def print_garbage(payload, results):
    """Far more than anybody keeps, not text, without a line end."""
    block = bytes(range(128, 256)) * (1 << 13)
    for _ in range(128):
        os.write(1, block)
    os.write(2, block)


def leave_grandchild(payload, results):
    """A process in a session of its own that ignores what can be ignored and does not know where it comes from."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            os.execve(sys.executable, [sys.executable, "-S", "-c", "import time; time.sleep(600)", payload["mark"]], {})
        os._exit(0)
    os.wait()


def leave_and_wait(payload, results):
    leave_grandchild(payload, results)
    write(results, "ready")
    endless(payload, results)


def kill_guard(payload, results):
    os.kill(os.getppid(), signal.SIGKILL)
    time.sleep(60)


def write_slowly(payload, results):
    """A result every now and then, for longer in all than the limit of seconds."""
    for number in range(5):
        time.sleep(payload["pause"])
        write(results, str(number))


def dump_environment(payload, results):
    write(results, "environment", repr(dict(os.environ)).encode())
    write(results, "stdin", sys.stdin.buffer.read())
