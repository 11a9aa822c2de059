"""The options of `muster serve`, checked before anything is loaded."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.errors import EnvironmentLackError, UsageError

_PACKAGES = ("fastapi", "uvicorn", "pydantic", "prometheus_client")


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        model: the checkpoint.
        host, port: where to listen.
        name: of the model for clients; None: its directory's.
        api_key_file: one key a line; None: clients need none.
        kv_gib: GiB of key-value cache; None: the engine's default.
        max_queue: most requests that wait.
        max_body: MiB of the largest body.
        reasoning_style, tool_style: parsers by name; None: as the checkpoint's chat template has it.
        drain: seconds that requests have to end after SIGTERM.
        watchdog: seconds after which a step counts as hung.
        engine: further options of `LLM`.
    """

    model: Path
    host: str
    port: int
    name: str | None
    api_key_file: Path | None
    kv_gib: float | None
    max_queue: int
    max_body: float
    reasoning_style: str | None
    tool_style: str | None
    drain: float
    watchdog: float
    engine: dict[str, Any]

    def serve(self) -> None:
        """Serves until a signal ends it.

        Raises:
            EnvironmentLackError: packages that are not installed.
            UsageError: every option that cannot be used.
            MusterError: the model cannot be loaded or does not compute right.
        """
        missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
        if missing:
            hint = "pip install 'muster-moe[server]'"
            raise EnvironmentLackError("muster serve", found=f"no {', '.join(missing)}", expected="them", hint=hint)
        self._check()
        from muster.server.serve import command
        from muster.server.service import Settings

        settings = Settings(
            name=self.name or self.model.resolve().name,
            keys=self._keys(),
            loopback=self.host == "localhost" or self.host == "::1" or self.host.startswith("127."),
            queue=self.max_queue,
            body_bytes=int(self.max_body * (1 << 20)),
            reasoning=self.reasoning_style,
            tools=self.tool_style,
        )
        kv_bytes = None if self.kv_gib is None else int(self.kv_gib * (1 << 30))
        command(
            self.model,
            host=self.host,
            port=self.port,
            settings=settings,
            drain=self.drain,
            watchdog=self.watchdog,
            options={**self.engine, "kv_bytes": kv_bytes},
        )

    def _check(self) -> None:
        from muster.server.styles import styles

        problems = []
        if not self.model.is_dir():
            problems.append(UsageError("MODEL", found=str(self.model), expected="a checkpoint's directory"))
        for option, value in (("--reasoning-style", self.reasoning_style), ("--tool-style", self.tool_style)):
            if value is not None and value not in styles():
                problems.append(UsageError(option, found=value, expected=f"one of {', '.join(styles())}"))
        if self.max_body <= 0:
            problems.append(UsageError("--max-body", found=f"{self.max_body:g}", expected="MiB, above 0"))
        if self.kv_gib is not None and self.kv_gib <= 0:
            problems.append(UsageError("--kv-gib", found=f"{self.kv_gib:g}", expected="GiB, above 0"))
        error = UsageError.gather("muster serve", problems)
        if error is not None:
            raise error

    def _keys(self) -> tuple[str, ...]:
        if self.api_key_file is None:
            return ()
        try:
            keys = tuple(filter(None, map(str.strip, self.api_key_file.read_text().splitlines())))
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError("--api-key-file", found=type(error).__name__, expected="a text file") from error
        if not keys:
            raise UsageError("--api-key-file", found="no key in it", expected="one key a line")
        return keys
