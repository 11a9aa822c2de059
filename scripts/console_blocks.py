"""Puts what commands print into the pages that show them: `python scripts/console_blocks.py docs/inspect.md`.

A block that begins with ```console and a line `$ muster ...` is followed by that command's output.
"""

import re
import shlex
import subprocess
import sys
from pathlib import Path

_BLOCK = re.compile(r"```console\n\$ muster ([^\n]*)\n.*?```", re.DOTALL)


def refreshed(page: str) -> str:
    """The page with the output of every command as it is now."""
    return _BLOCK.sub(lambda block: f"```console\n$ muster {block[1]}\n{_output(block[1])}```", page)


def _output(arguments: str) -> str:
    command = [sys.executable, "-m", "muster.cli", *shlex.split(arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    for name in sys.argv[1:]:
        Path(name).write_text(refreshed(Path(name).read_text(encoding="utf-8")), encoding="utf-8")
