"""What every record says of itself, the machine, the software, the commit and the time; and what benches are told."""

from __future__ import annotations

import argparse
import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from muster.device import cpu


def setting(*packages: str, commit: str | None = None) -> dict[str, str]:
    """The setting of this process, with the versions of torch and of `packages`; git says the `commit` if need be."""
    device = cpu()
    return {
        "machine": f"{device.name}, {device.cores} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", *packages)},
        "commit": commit or _commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def arguments(purpose: str, rounds: int) -> argparse.Namespace:
    """Of a bench: the `output` to write and how many `rounds`, by default so many."""
    parser = argparse.ArgumentParser(description=purpose.partition("\n")[0])
    parser.add_argument("output", type=Path)
    parser.add_argument("--rounds", type=int, default=rounds)
    return parser.parse_args()


def _commit() -> str:
    """The commit that is measured, "unknown" in a copy that git knows nothing of.

    Edited files count against it, except the records themselves.
    """
    try:
        edited = _git("status", "--porcelain", "--", ".", ":!results")
        return _git("rev-parse", "--short", "HEAD") + ("-dirty" if edited else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True).stdout.strip()
