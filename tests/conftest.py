"""What all tests share: a MUSTER_HOME of their own and an interrupt that is heard, for child processes too."""

import os
import signal
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or writes the ledger and the plans of the user."""
    before = os.environ.get("MUSTER_HOME")
    os.environ["MUSTER_HOME"] = str(tmp_path_factory.mktemp("home"))
    yield
    if before is None:
        del os.environ["MUSTER_HOME"]
    else:
        os.environ["MUSTER_HOME"] = before


@pytest.fixture(scope="session", autouse=True)
def interrupts() -> None:
    """A shell starts what runs in its background with interrupts ignored, and children would inherit that."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
