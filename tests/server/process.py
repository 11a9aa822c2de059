"""A server in a process of its own, as an operator would start it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx

LAUNCH = Path(__file__).with_name("launch.py")


class Server:
    """`muster serve` on a free port; with a fault, as `launch.py` has it."""

    def __init__(self, directory, *options, fault=None, home=None, wait=True):
        program = [str(LAUNCH), fault] if fault else ["-m", "muster.cli", "serve"]
        command = [sys.executable, *program, str(directory), "--port", "0", "--unproven", *map(str, options)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "MUSTER_THREADS": "1"}
        if home is not None:
            environment["MUSTER_HOME"] = str(home)
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
        self.log = []
        self.text = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if wait:
            self.url = self.event("listening")["url"]
            self.wait(lambda: self.get("/health/ready").status_code == 200)

    def _read(self):
        for line in self.process.stderr:
            self.text += line
            if line.startswith("{"):
                self.log.append(json.loads(line))

    def wait(self, condition, seconds=60):
        """Until a condition holds; fails when the process ends before."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"still not after {seconds} s\n{self.text[-2000:]}"
            assert self.process.poll() is None, f"exit code {self.process.returncode}\n{self.text[-2000:]}"
            time.sleep(0.02)

    def event(self, name):
        """The first line of the log about that."""
        self.wait(lambda: any(line["event"] == name for line in list(self.log)))
        return next(line for line in self.log if line["event"] == name)

    def get(self, path, **options):
        return httpx.get(self.url + path, timeout=30, **options)

    def post(self, path, body, **options):
        return httpx.post(self.url + path, json=body, timeout=60, **options)

    def state(self):
        return self.get("/v1/muster/state").json()

    def at_rest(self):
        """Whether no request lives and every page is free."""
        state = self.state()
        free = state["pages"]["free"] == state["pages"]["all"]
        return free and not (state["alive"] or state["running"] or state["waiting"])

    def signal(self, number):
        self.process.send_signal(number)

    def exit_code(self, seconds=30):
        code = self.process.wait(seconds)
        self._reader.join(5)
        return code

    def stop(self):
        """Ends it in order, if it still runs; what must be true of every server at its end."""
        if self.process.poll() is None:
            self.signal(signal.SIGTERM)
            assert self.exit_code() == 0, self.text[-2000:]
        assert not [line for line in self.log if line["event"] == "bug"], self.text[-4000:]

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.stop()
        else:
            self.process.kill()
