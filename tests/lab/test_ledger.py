"""The ledger keeps what it acknowledged, whoever writes beside it and whenever its writer dies."""

import multiprocessing
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from muster.errors import EnvironmentLackError, InputError, UsageError
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import FILE, VERSION, Ledger, new_id

from .ledger_rows import ENVIRONMENT, PART, SOURCE, evidence, failures, timing

fork = multiprocessing.get_context("fork")


def sound(path: Path) -> bool:
    connection = sqlite3.connect(path)
    (answer,) = connection.execute("PRAGMA integrity_check").fetchone()
    connection.close()
    return answer == "ok"


def write_hundred(home: Path, backend: str) -> None:
    with Ledger.open(home) as ledger:
        for number in range(100):
            row = evidence(backend=backend, tokens=number)
            ledger.add(row)
            if number % 10 == 0:
                ledger.add_timing(timing(row))


def test_rows_come_back_as_they_went_in(tmp_path):
    row = evidence()
    time_of = timing(row)
    with Ledger.open(tmp_path) as ledger:
        ledger.add(row)
        ledger.add_timing(time_of)
    with Ledger.open(tmp_path) as ledger:
        assert ledger.get(row.id) == ledger.find(row.id) == row
        assert ledger.find(time_of.id) == time_of
        assert ledger.timings(evidence=row.id) == (time_of,)


def test_numbers_that_are_not_finite_and_text_that_is_not_utf8_are_kept(tmp_path):
    rows = failures()
    with Ledger.open(tmp_path) as ledger:
        ledger.add_all(rows)
        found = ledger.evidence()
    assert [row.errors for row in found] == [row.errors for row in rows]
    assert {row.verdict for row in found} == {verdict for verdict in Verdict if verdict.failed}
    assert all("\\udcff" in row.message and "café" in row.message for row in found)


def test_questions_select_by_every_field_and_keep_the_order(tmp_path):
    rows = [
        evidence(backend="cpu", tokens=1),
        evidence(backend="torch", tokens=1, verdict=Verdict.CRASH),
        evidence(backend="cpu", tokens=8, role="draft"),
        evidence(backend="cpu", tokens=1, part="linears bf16 N8 K4 f32"),
    ]
    with Ledger.open(tmp_path) as ledger:
        ledger.add_all(rows)
        assert ledger.evidence() == tuple(rows)
        assert ledger.evidence(PART) == tuple(rows[:3])
        assert ledger.evidence(PART, "cpu") == (rows[0], rows[2])
        assert ledger.evidence(tokens=1, backend="cpu") == (rows[0], rows[3])
        assert ledger.evidence(role="draft") == (rows[2],)
        assert ledger.evidence(verdict=Verdict.CRASH) == (rows[1],)
        assert ledger.evidence(origin="elsewhere") == ()


@pytest.mark.parametrize("statement", ["DELETE FROM {0}", "UPDATE {0} SET record = '{{}}'"])
@pytest.mark.parametrize("table", ["evidence", "timing"])
def test_the_file_itself_refuses_to_lose_or_change_a_row(tmp_path, table, statement):
    row = evidence(verdict=Verdict.CRASH)
    with Ledger.open(tmp_path) as ledger:
        ledger.add(row)
        ledger.add_timing(timing(row))
    connection = sqlite3.connect(tmp_path / FILE)
    with pytest.raises(sqlite3.IntegrityError, match="only grows"):
        connection.execute(statement.format(table))
    connection.close()


def test_many_rows_are_kept_together_or_not_at_all(tmp_path):
    first = evidence()
    with Ledger.open(tmp_path) as ledger:
        ledger.add(first)
        with pytest.raises(UsageError, match=first.id):
            ledger.add_all((evidence(), evidence(), replace(evidence(), id=first.id)))
        assert ledger.evidence() == (first,)


def test_ids_are_unique_and_found_by_any_beginning_that_only_one_has(tmp_path):
    assert len({new_id() for _ in range(20_000)}) == 20_000
    one, two = replace(evidence(), id="abc000000000"), replace(evidence(), id="abd000000000")
    with Ledger.open(tmp_path) as ledger:
        ledger.add_all((one, two))
        ledger.add_timing(replace(timing(one), id="abe000000000"))
        assert ledger.get("abc") == one
        with pytest.raises(UsageError) as ambiguous:
            ledger.get("ab")
        assert "abc000000000, abd000000000" in str(ambiguous.value)
        with pytest.raises(UsageError, match="abe000000000"):
            ledger.find("ab")
        ledger.add_all(evidence() for _ in range(500))
        with pytest.raises(UsageError) as everything:
            ledger.find("")
        assert "and 493 more" in str(everything.value)
        for nothing in ("z", "%", "_bc", "abc0000000000"):
            with pytest.raises(UsageError, match="none in"):
                ledger.find(nothing)


def test_processes_that_write_at_once_all_keep_their_rows(tmp_path):
    """They also race to make the file."""
    writers = [fork.Process(target=write_hundred, args=(tmp_path, f"b{number}")) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
        assert writer.exitcode == 0
    assert sound(tmp_path / FILE)
    with Ledger.open(tmp_path) as ledger:
        for number in range(4):
            assert [row.tokens for row in ledger.evidence(backend=f"b{number}")] == list(range(100))
        assert len(ledger.timings()) == 40


def write_until_killed(home: Path, acknowledged: int, begin: int) -> None:
    with Ledger.open(home) as ledger:
        for number in range(begin, begin + 1_000_000):
            ledger.add(evidence(tokens=number, message="x" * 3000))
            os.write(acknowledged, f"{number}\n".encode())


def test_no_kill_loses_an_acknowledged_row_or_harms_the_file(tmp_path):
    """kill -9 at random moments, the making of the file among them; at most the row in flight is kept unasked."""
    moments = random.Random(3)
    promised: list[int] = []
    in_the_middle = 0
    for round_ in range(40):
        reading, writing = os.pipe()
        writer = fork.Process(target=write_until_killed, args=(tmp_path, writing, round_ * 1_000_000))
        writer.start()
        os.close(writing)
        with os.fdopen(reading) as acknowledged:
            first = acknowledged.readline() if round_ >= 10 else ""  # the first ten may not get as far as a row
            time.sleep(moments.uniform(0.0, 0.05))
            os.kill(writer.pid, signal.SIGKILL)
            writer.join()
            promised += map(int, (first + acknowledged.read()).split())
        journal = tmp_path / f"{FILE}-journal"
        in_the_middle += journal.exists() and journal.stat().st_size > 0
    with Ledger.open(tmp_path) as ledger:
        kept = [row.tokens for row in ledger.evidence()]
    assert sound(tmp_path / FILE)
    assert in_the_middle > 5
    assert len(promised) > 40
    assert set(promised) <= set(kept)
    assert len(kept) == len(set(kept)) <= len(promised) + 40


def make_text(path: Path) -> None:
    path.write_text("this is not SQLite\n" * 100)


def make_torn(path: Path) -> None:
    with Ledger.open(path.parent) as ledger:
        ledger.add_all(evidence(message="x" * 2000) for _ in range(50))
    content = bytearray(path.read_bytes())
    content[4096 : len(content) // 2] = os.urandom(len(content) // 2 - 4096)
    path.write_bytes(content)


def make_cut_short(path: Path) -> None:
    with Ledger.open(path.parent) as ledger:
        ledger.add_all(evidence(message="x" * 2000) for _ in range(50))
    path.write_bytes(path.read_bytes()[: 3 * 4096 + 100])


def make_record_unreadable(path: Path) -> None:
    with Ledger.open(path.parent) as ledger:
        ledger.add(evidence())
    content = path.read_bytes()
    assert b'"verdict": "proven"' in content
    path.write_bytes(content.replace(b'"verdict": "proven"', b'"verdict": "blessd"'))


@pytest.mark.parametrize("make", [make_text, make_torn, make_cut_short, make_record_unreadable])
def test_a_damaged_file_is_a_named_error_with_a_next_step(tmp_path, make: Callable[[Path], None]):
    make(tmp_path / FILE)
    with pytest.raises(InputError) as raised, Ledger.open(tmp_path) as ledger:
        ledger.evidence()
    assert FILE in str(raised.value)
    assert "move it away (mv " in str(raised.value)


def test_a_file_of_another_program_is_left_alone(tmp_path):
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute("CREATE TABLE songs (title)")
    connection.commit()
    connection.close()
    before = (tmp_path / FILE).read_bytes()
    with pytest.raises(InputError, match="of another program"):
        Ledger.open(tmp_path)
    assert (tmp_path / FILE).read_bytes() == before


def test_a_newer_schema_asks_for_a_newer_muster(tmp_path):
    Ledger.open(tmp_path).close()
    connection = sqlite3.connect(tmp_path / FILE)
    connection.execute(f"PRAGMA user_version = {VERSION + 1}")
    connection.commit()
    connection.close()
    with pytest.raises(InputError) as raised:
        Ledger.open(tmp_path)
    assert f"schema version {VERSION + 1}" in str(raised.value)
    assert "upgrade" in str(raised.value)


def test_a_full_disk_is_a_named_error_and_loses_nothing(tmp_path):
    """The limit on a file's size stands for the disk; the kernel refuses the write just the same."""
    with Ledger.open(tmp_path) as ledger:
        ledger.add(evidence())
    size = (tmp_path / FILE).stat().st_size
    program = f"""
import resource, signal
from pathlib import Path
from muster.errors import EnvironmentLackError
from muster.lab.ledger.ledger import Ledger
from tests.lab.ledger_rows import evidence
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, ({size + 8192}, {size + 8192}))
with Ledger.open(Path({str(tmp_path)!r})) as ledger:
    for kept in range(1000):
        try:
            ledger.add(evidence(tokens=kept, message="x" * 1000))
        except EnvironmentLackError as error:
            print(kept)
            raise SystemExit(str(error))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert FILE in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert sound(tmp_path / FILE)
    with Ledger.open(tmp_path) as ledger:
        assert [row.tokens for row in ledger.evidence()] == [4, *range(int(done.stdout))]


@pytest.mark.skipif(not Path("/proc/self").exists(), reason="needs a directory that nobody may write to")
def test_a_home_that_cannot_be_made_is_a_named_error():
    with pytest.raises(EnvironmentLackError, match="set MUSTER_HOME"):
        Ledger.open(Path("/proc/self/muster"))


def test_a_directory_in_the_place_of_the_file_is_a_named_error(tmp_path):
    (tmp_path / FILE).mkdir()
    with pytest.raises(EnvironmentLackError, match="SQLITE_CANTOPEN"):
        Ledger.open(tmp_path)


def test_a_file_that_may_only_be_read_is_read_and_refuses_rows(tmp_path):
    row = evidence()
    with Ledger.open(tmp_path) as ledger:
        ledger.add(row)
    with Ledger.read(tmp_path / FILE) as ledger:
        assert ledger.evidence() == (row,)
        with pytest.raises(EnvironmentLackError, match="SQLITE_READONLY"):
            ledger.add(evidence())


def test_what_counts_is_this_machine_with_the_same_libraries_and_source(tmp_path):
    row = evidence()
    changed = {**ENVIRONMENT, "driver": "580.2", "python": "3.12"}
    with Ledger.open(tmp_path) as ledger:
        assert ledger.counts(row, ENVIRONMENT, SOURCE) == ()
        assert ledger.counts(row, changed, SOURCE) == ("driver 570.1 then, 580.2 now",)
        assert ledger.counts(row, ENVIRONMENT, "6" * 64) == ("source 555555555555 then, 666666666666 now",)
        assert ledger.counts(timing(row), changed, SOURCE) == ("driver 570.1 then, 580.2 now",)
        assert ledger.counts(replace(row, origin="lab-7"), ENVIRONMENT, SOURCE) == ("foreign: from lab-7",)
