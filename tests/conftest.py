"""What all tests share: an environment of their own, which child processes inherit, and an interrupt that is heard."""

import os
import signal
from collections.abc import Iterator

import pytest

TERMINAL = ("NO_COLOR", "FORCE_COLOR", "PY_COLORS", "GITHUB_ACTIONS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")
"""By these libraries decide what a terminal is and what it shows."""


@pytest.fixture(scope="session", autouse=True)
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the ledger and the plans of the user; neither settings nor terminal of theirs matter."""
    with pytest.MonkeyPatch.context() as patch:
        for name in (*TERMINAL, "COLUMNS", "LINES", *(name for name in os.environ if name.startswith("MUSTER_"))):
            patch.delenv(name, raising=False)
        patch.setenv("TERM", "xterm-256color")
        patch.setenv("MUSTER_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
