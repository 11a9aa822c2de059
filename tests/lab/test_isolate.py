"""An isolated process can do what it likes: its caller learns how it ended, and nothing of it is left."""

import itertools
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from muster.lab.prove import isolate
from muster.lab.prove.isolate import Limits

HERE = Path(__file__).parent / "misbehaving"
PATIENT = Limits(seconds=10)
QUICK = Limits(seconds=1)


@pytest.fixture(autouse=True)
def _misdeeds(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def run(tmp_path):
    def run(misdeed, payload=None, limits=PATIENT, **options):
        with isolate.run(f"misdeeds:{misdeed}", payload or {}, limits, **options) as outcome:
            assert outcome.results.is_dir()
            assert outcome.results.parent.stat().st_mode & 0o077 == 0
        assert not outcome.results.parent.exists()
        return outcome

    return run


def processes(mark):
    """Ids of the processes that carry the mark in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:
            continue
    return [pid for pid in found if pid != os.getpid()]


def test_results_come_back_as_files(tmp_path):
    with isolate.run("misdeeds:echo", {"x": [1, "ü"]}, PATIENT) as outcome:
        assert outcome.good
        assert (outcome.results / "echo").read_text() == "{'x': [1, 'ü']}"
    assert not outcome.results.exists()


def test_results_are_told_of_while_the_process_works_on(run):
    told = []
    outcome = run("write_slowly", {"pause": 0.3}, on_result=lambda path, at: told.append((path.name, at, time.time())))
    assert outcome.good
    assert [name for name, _, _ in told] == ["0", "1", "2", "3", "4"]
    assert told[-1][2] - told[0][2] > 0.6
    assert all(later > earlier for (_, earlier, _), (_, later, _) in itertools.pairwise(told))


def test_the_limit_of_seconds_counts_from_the_last_result(run):
    assert run("write_slowly", {"pause": 0.4}, QUICK).good
    outcome = run("write_slowly", {"pause": 5.0}, QUICK)
    assert outcome.timed_out


@pytest.mark.parametrize(
    ("misdeed", "number"), [("segfault", signal.SIGSEGV), ("abort", signal.SIGABRT)], ids=lambda value: str(value)
)
def test_a_deadly_signal_is_named_with_its_place(run, misdeed, number):
    outcome = run(misdeed)
    assert outcome.signal == number
    assert outcome.exit_code is None
    assert not outcome.good
    assert outcome.describe().startswith(f"{number.name} at ")


def test_what_ignores_termination_is_killed_and_its_place_known(run):
    start = time.monotonic()
    outcome = run("endless", limits=QUICK)
    assert outcome.timed_out
    assert not outcome.good
    assert time.monotonic() - start < 5
    assert " in endless" in outcome.describe()


def test_a_quiet_exit_is_no_failure_by_itself(run):
    outcome = run("exit_quietly")
    assert outcome.exit_code == 0
    assert outcome.failure is None


def test_a_polite_exit_is_an_exception(run):
    outcome = run("exit_politely")
    assert not outcome.good
    assert outcome.failure.type == "SystemExit"


def test_an_exception_arrives_whatever_its_message_holds(run):
    outcome = run("raise_garbage")
    assert outcome.failure.type == "RuntimeError"
    assert r"caf\udce9" in outcome.failure.message
    assert "raise_garbage" in outcome.failure.where
    outcome.describe().encode("utf-8")
    assert "\n" not in outcome.describe()
    assert run("raise_unprintable").failure.message == "its message raises ValueError"


def test_a_function_that_is_not_there_is_an_exception(run):
    assert run("no_such_function").failure.type == "AttributeError"


def test_an_allocation_beyond_the_limit_is_refused(run):
    outcome = run("allocate", limits=Limits(5, memory_bytes=1 << 30))
    assert outcome.out_of_memory
    assert outcome.failure.type == "MemoryError"


def test_memory_that_no_limit_counts_is_watched(run):
    outcome = run("share", limits=Limits(20, memory_bytes=200 << 20))
    assert outcome.out_of_memory
    assert not outcome.good
    assert 200 << 20 < outcome.peak_memory < 8 << 30


def test_of_endless_garbage_only_the_end_is_kept(run):
    outcome = run("print_garbage", limits=Limits(10, output_bytes=1000))
    assert outcome.good
    assert outcome.stdout_tail.endswith(r"\xfd\xfe\xff")
    assert outcome.stderr_tail.endswith(r"\xfd\xfe\xff")
    assert len(outcome.stdout_tail) == 4 * 1000


def test_orphans_in_other_sessions_without_environment_die(run):
    mark = str(uuid.uuid4())
    outcome = run("leave_grandchild", {"mark": mark})
    assert outcome.good
    assert outcome.left_behind == 1
    assert processes(mark) == []


def test_who_kills_the_guard_dies_with_it(run, tmp_path):
    outcome = run("kill_guard")
    assert not outcome.good
    assert outcome.describe().startswith("GuardKilled: ")
    assert list(tmp_path.iterdir()) == []


def test_standard_input_is_empty_and_the_environment_is_the_given_one():
    with isolate.run("misdeeds:dump_environment", {}, PATIENT, environment={"ONLY": "this"}) as outcome:
        assert (outcome.results / "stdin").read_bytes() == b""
        seen = (outcome.results / "environment").read_text()
    assert "'ONLY': 'this'" in seen
    assert "PATH" not in seen


def test_an_exception_of_the_caller_ends_the_process(tmp_path):
    def interrupt(path, at):
        raise KeyboardInterrupt

    with (
        pytest.raises(KeyboardInterrupt),
        isolate.run("misdeeds:write_slowly", {"pause": 0.1}, PATIENT, on_result=interrupt),
    ):
        raise AssertionError("not reached")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_of_a_caller_that_is_killed(how, tmp_path):
    program = (
        "import sys\n"
        "from muster.lab.prove import isolate\n"
        "def told(path, at): print(path, flush=True)\n"
        "with isolate.run('misdeeds:leave_and_wait', {'mark': sys.argv[1]}, isolate.Limits(60), on_result=told): pass\n"
    )
    mark = str(uuid.uuid4())
    environment = {**os.environ, "PYTHONPATH": str(HERE)}
    with subprocess.Popen(
        [sys.executable, "-c", program, mark], env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as caller:
        assert caller.stdout.readline()
        caller.send_signal(how)
    assert within(5, lambda: not processes(mark))
    assert within(5, lambda: not list(tmp_path.iterdir()))


def within(seconds, holds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if holds():
            return True
        time.sleep(0.02)
    return holds()
