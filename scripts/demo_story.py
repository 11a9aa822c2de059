"""The demo checkpoint from no evidence to an answer: what each command takes and prints, in a MUSTER_HOME of its own.

    python scripts/demo_story.py results/demo-story.jsonl

One record per command: its seconds, what it printed on stdout, and the end of stderr.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from setting import setting

from muster import env
from muster.lab.build.demo import write_demo

COMMANDS = (("verify",), ("bench",), ("plan",), ("run", "-p", "Say hello.", "--max-tokens", "32"))
LAST_LINES = 2


def main() -> None:
    """Runs the commands one after the other and writes their records."""
    demo = env.read().home / "demo"
    write_demo(demo)
    with tempfile.TemporaryDirectory() as home, Path(sys.argv[1]).open("w") as records:
        for name, *options in COMMANDS:
            record = told(home, name, str(demo / "nvfp4"), *options)
            records.write(json.dumps({**record, **setting()}) + "\n")
            print(f"{name:8} {record['seconds']:6.1f} s", flush=True)


def told(home: str, name: str, *arguments: str) -> dict[str, object]:
    """The record of one command; one that fails ends the story."""
    environment = {**os.environ, "MUSTER_HOME": home}
    start = time.perf_counter()
    command = [sys.executable, "-m", "muster.cli", name, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr}")
    last = done.stderr.replace(home, "MUSTER_HOME").splitlines()[-LAST_LINES:]
    return {"what": name, "seconds": round(seconds, 1), "stdout": done.stdout, "stderr_end": last}


if __name__ == "__main__":
    main()
