"""Environment switches: typed, defaulted, and never ignored quietly."""

from pathlib import Path

import pytest

from muster import env
from muster.errors import UsageError


def test_defaults_use_every_core_and_the_data_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    switches = env.read({})
    assert switches.home == tmp_path / "muster"
    assert switches.threads >= 1
    assert switches.device == "auto"


def test_values_are_read() -> None:
    environ = {"MUSTER_HOME": "/nowhere/x", "MUSTER_THREADS": "3", "MUSTER_DEVICE": "cpu"}
    assert env.read(environ) == env.Env(Path("/nowhere/x"), 3, "cpu")


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", ""])
def test_a_bad_thread_count_stops_the_program(value: str) -> None:
    with pytest.raises(UsageError, match="MUSTER_THREADS"):
        env.read({"MUSTER_THREADS": value})


def test_every_problem_is_reported_at_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(UsageError) as caught:
        env.read({"MUSTER_HOME": str(file), "MUSTER_THREADS": "none", "MUSTER_TREADS": "4", "MUSTER_DEVICE": "tpu"})
    message = str(caught.value)
    assert "MUSTER_HOME" in message
    assert "MUSTER_THREADS" in message
    assert "MUSTER_TREADS" in message
    assert "MUSTER_DEVICE" in message
