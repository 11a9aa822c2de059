"""Every MUSTER_* environment switch: its type, default and purpose. A bad or unknown one stops the program."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from muster.errors import UsageError

_DEVICES = ("auto", "cpu", "cuda")


def _default_home() -> Path:
    base = os.environ.get("XDG_DATA_HOME") or "~/.local/share"
    return Path(base).expanduser() / "muster"


@dataclass(frozen=True)
class Env:
    """The switches, by their names without the MUSTER_ prefix, in lower case.

    Attributes:
        home: MUSTER_HOME, where the demo checkpoints, the ledger and the plans live (the user's data directory).
        threads: MUSTER_THREADS, CPU threads to compute with (default: the cores this process may use).
        device: MUSTER_DEVICE, where models run: "cpu", "cuda", or "auto" (the default): the GPU when there is one.
    """

    home: Path
    threads: int
    device: str = "auto"


def read(environ: Mapping[str, str] | None = None) -> Env:
    """The switches of this process.

    Raises:
        UsageError: a value that cannot be used, or a MUSTER_ name that does not exist; all of them at once.
    """
    environ = os.environ if environ is None else environ
    known = {f"MUSTER_{field.name.upper()}" for field in fields(Env)}
    problems = [
        UsageError(f"environment variable {name}", expected=f"one of {', '.join(sorted(known))}")
        for name in sorted(environ)
        if name.startswith("MUSTER_") and name not in known
    ]
    home = Path(environ.get("MUSTER_HOME") or _default_home()).expanduser()
    if home.exists() and not home.is_dir():
        problems.append(UsageError("MUSTER_HOME", found=f"{home}, which is not a directory", expected="a directory"))

    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = environ.get("MUSTER_THREADS", str(cores))
    threads = int(text) if text.isdecimal() else 0
    if threads < 1:
        problems.append(UsageError("MUSTER_THREADS", found=repr(text), expected="a whole number of at least 1"))

    device = environ.get("MUSTER_DEVICE", "auto")
    if device not in _DEVICES:
        problems.append(UsageError("MUSTER_DEVICE", found=repr(device), expected=f"one of {', '.join(_DEVICES)}"))

    error = UsageError.gather("environment", problems)
    if error is not None:
        raise error
    return Env(home=home, threads=threads, device=device)
