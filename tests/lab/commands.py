"""The command line as a user has it: real processes on a tiny checkpoint, with a ledger of their own."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from model import oracle

ROOT = Path(__file__).parents[2]
MISBEHAVING = Path(__file__).parent / "misbehaving"
SECONDS = 240


@dataclass(frozen=True)
class Muster:
    """Runs commands with this MUSTER_HOME; backends of packages in `site` are installed beside ours."""

    home: Path
    site: Path | None = None

    def start(self, *arguments, **options):
        """A running command with pipes for its outputs."""
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(self.line(*arguments), env=self.environment, **{**pipes, **options})

    def run(self, *arguments):
        """A finished command, whatever its exit code."""
        process = self.start(*arguments)
        out, err = process.communicate(timeout=SECONDS)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def json(self, *arguments, code=0):
        """What a command with `--json` printed: exactly one document."""
        done = self.run(*arguments, "--json")
        assert done.returncode == code, done.stderr
        return json.loads(done.stdout)

    def line(self, *arguments):
        return [sys.executable, "-m", "muster.cli", *map(str, arguments)]

    @property
    def environment(self):
        paths = [str(path) for path in (self.site, ROOT) if path is not None]
        return {
            **os.environ,
            "MUSTER_HOME": str(self.home),
            "MUSTER_THREADS": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(paths),
        }


def checkpoint(directory):
    """A Mixtral of one layer in bf16, of a size that every backend of ours takes."""
    sizes = {"hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 1}
    return oracle.save(oracle.make("mixtral", stored=torch.bfloat16, **sizes), directory, torch.bfloat16)


def first_line(stream, beginning):
    """Waits for a line of a running command's output that begins so."""
    for line in stream:
        if line.startswith(beginning):
            return line
    raise AssertionError(f"no line that begins with {beginning!r}")
