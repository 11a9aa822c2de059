"""What every record says of itself: the machine, the software, the commit and the time."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import version

from muster.device import cpu


def setting(*packages: str) -> dict[str, str]:
    """The setting of this process, with the versions of torch and of `packages`."""
    device = cpu()
    commit = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    return {
        "machine": f"{device.name}, {device.cores} cores",
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", *packages)},
        "commit": commit.stdout.strip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
