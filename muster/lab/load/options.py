"""The options of `muster bench --server`, checked before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from muster.errors import MusterError, UsageError
from muster.lab.load import lengths
from muster.lab.load.arrivals import Arrivals
from muster.lab.load.load import Load, command
from muster.lab.load.objective import Objective

T = TypeVar("T")

SECONDS = 30.0
"""In which requests are due where neither a number of requests nor a time is given."""


@dataclass(frozen=True)
class Options:
    """What the command line says; None: nothing.

    Attributes:
        server: URL, with or without `/v1`.
        model: name there.
        api_key_file: its first line that is not empty is the key.
        rate: requests per second, separated by commas.
        requests, seconds: per rate.
        arrivals, lengths, slo: as their modules read them.
        shared_prefix: tokens that all prompts begin with.
        seed: of arrivals and lengths.
        warm_up: requests that are not counted.
        timeout: seconds.
        csv, plot: files to write.
        json: one document instead of tables.
    """

    server: str
    model: str | None = None
    api_key_file: Path | None = None
    rate: str = "1"
    requests: int | None = None
    seconds: float | None = None
    arrivals: str = "poisson"
    lengths: str = "chat"
    slo: str | None = None
    shared_prefix: int = 0
    seed: int = 0
    warm_up: int = 0
    timeout: float = 600.0
    csv: Path | None = None
    plot: Path | None = None
    json: bool = False

    def bench(self, foreign: Sequence[str]) -> None:
        """Loads the server and tells how it bore it.

        Args:
            foreign: options given that mean nothing to a server, by name.

        Raises:
            UsageError: every option that cannot be used.
            EnvironmentLackError: a package that is not installed.
            MusterError: the server is not there, or completed nothing.
        """
        command(self._load(foreign), csv=self.csv, plot=self.plot, json=self.json)

    def _load(self, foreign: Sequence[str]) -> Load:
        problems = [UsageError(name, found="it beside --server", expected="it with MODEL only") for name in foreign]
        attempt = _Attempts([*problems, *self._out_of_range()])
        rates = attempt(_rates, self.rate)
        arrivals = attempt(Arrivals.parse, self.arrivals)
        pairs = attempt(lengths.parse, self.lengths)
        objective = attempt(Objective.parse, self.slo) if self.slo is not None else Objective()
        server = attempt(_url, self.server)
        key = attempt(_key, self.api_key_file) if self.api_key_file is not None else None
        attempt(_place, self.csv)
        attempt(_picture, self.plot)
        attempt.conclude()
        return Load(
            server=_sound(server),
            model=self.model,
            key=key,
            rates=_sound(rates),
            arrivals=_sound(arrivals),
            lengths=_sound(pairs),
            named=self.lengths,
            count=self.requests,
            seconds=SECONDS if self.requests is None and self.seconds is None else self.seconds,
            seed=self.seed,
            shared=self.shared_prefix,
            warm_up=self.warm_up,
            timeout=self.timeout,
            objective=_sound(objective),
        )

    def _out_of_range(self) -> list[MusterError]:
        requests, seconds = self.requests, self.seconds
        checks: Mapping[str, tuple[object, bool, str]] = {
            "--requests": (requests, requests is None or requests >= 1, "at least 1"),
            "--seconds": (seconds, seconds is None or 0 < seconds < math.inf, "above 0"),
            "--requests and --seconds": ("both", requests is None or seconds is None, "one of them"),
            "--shared-prefix": (self.shared_prefix, self.shared_prefix >= 0, "tokens, at least 0"),
            "--warm-up": (self.warm_up, self.warm_up >= 0, "at least 0"),
            "--timeout": (self.timeout, 0 < self.timeout < math.inf, "seconds, above 0"),
        }
        return [
            UsageError(name, found=str(value), expected=expected)
            for name, (value, sound, expected) in checks.items()
            if not sound
        ]


class _Attempts:
    """Calls what reads an option and keeps its complaint beside those there are."""

    def __init__(self, problems: list[MusterError]) -> None:
        self._problems = problems

    def conclude(self) -> None:
        """Raises all complaints as one."""
        error = UsageError.only_or_all("options", self._problems)
        if error is not None:
            raise error

    def __call__(self, read: Callable[[Any], T], value: Any) -> T | None:
        try:
            return read(value)
        except MusterError as error:
            self._problems += error.reasons or (error,)
            return None


def _sound(value: T | None) -> T:
    """What `_Attempts.conclude` let pass."""
    assert value is not None
    return value


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(word) for word in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0 < rate < math.inf for rate in rates):
        raise UsageError("--rate", found=text, expected="requests per second, above 0, such as 1,2,4")
    if len(set(rates)) < len(rates):
        raise UsageError("--rate", found=text, expected="each rate once")
    return rates


def _url(text: str) -> str:
    try:
        parts = urlsplit(text)
        sound = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
        _ = parts.port
    except ValueError:
        sound = False
    if not sound:
        raise UsageError("--server", found=text, expected="a URL such as http://localhost:8000")
    return text.rstrip("/").removesuffix("/v1").rstrip("/")


def _key(path: Path) -> str:
    try:
        keys = list(filter(None, map(str.strip, path.read_text(encoding="utf-8").splitlines())))
    except (OSError, UnicodeDecodeError) as error:
        found = f"{path}: {type(error).__name__}"
        raise UsageError("--api-key-file", found=found, expected="a text file") from error
    if not keys or not keys[0].isascii() or not keys[0].isprintable():
        raise UsageError("--api-key-file", found=f"no key in {path}", expected="one on its first line")
    return keys[0]


def _place(path: Path | None) -> None:
    if path is not None and not path.parent.is_dir():
        raise UsageError("--csv", found=f"no directory {path.parent}", expected="one that exists")
    if path is not None and path.is_dir():
        raise UsageError("--csv", found=f"the directory {path}", expected="a file")


def _picture(path: Path | None) -> None:
    if path is not None:
        from muster.lab.plot import check_can_save

        check_can_save(path)
