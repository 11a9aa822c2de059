"""Evidence that travels arrives whole, is marked as foreign, never counts, and never arrives in part."""

import json
import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import pytest

from muster.errors import EnvironmentLackError, FormatError, InputError, UsageError
from muster.lab.ledger import exchange, traces
from muster.lab.ledger.evidence import Errors, Verdict
from muster.lab.ledger.ledger import FILE, Ledger
from muster.lab.ledger.ledgers import Filter, export_command, import_command, list_command, show_command

from .ledger_rows import ENVIRONMENT, SOURCE, evidence, failures, timing


@pytest.fixture
def there(tmp_path):
    """Another machine's home: a proven case with a time, every failure, and something it had imported itself."""
    home = tmp_path / "there"
    row = evidence()
    with Ledger.open(home) as ledger:
        ledger.add_all((row, timing(row), *failures()))
        ledger.add_foreign((evidence(),), "a third machine")
    return home


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path / "here"))
    return tmp_path / "here"


def export(home, path):
    with Ledger.open(home) as ledger:
        path.write_text("".join(f"{line}\n" for line in exchange.lines(exchange.pack(ledger))))
    return path


@pytest.mark.parametrize("form", ["lines", "file"])
def test_what_is_exported_arrives_whole_as_foreign_and_only_once(there, here, tmp_path, form, capsys):
    file = export(there, tmp_path / "other.jsonl") if form == "lines" else there / FILE
    with Ledger.open(there) as ledger:
        sent, times = ledger.evidence(origin=""), ledger.timings(origin="")
    import_command(file, "lab-7")
    with Ledger.open(here) as ledger:
        assert ledger.evidence() == tuple(replace(row, origin="lab-7") for row in sent)
        assert ledger.timings() == tuple(replace(row, origin="lab-7") for row in times)
        for row in ledger.evidence():
            assert ledger.counts(row, ENVIRONMENT, SOURCE) == ("foreign: from lab-7",)
        before = ledger.evidence()
    import_command(file, "another name")
    assert "0 records" in capsys.readouterr().err
    with Ledger.open(here) as ledger:
        assert ledger.evidence() == before


def test_its_own_export_adds_nothing_and_stays_its_own(there, tmp_path, monkeypatch):
    monkeypatch.setenv("MUSTER_HOME", str(there))
    with Ledger.open(there) as ledger:
        before = ledger.evidence()
    import_command(export(there, tmp_path / "own.jsonl"), None)
    with Ledger.open(there) as ledger:
        assert ledger.evidence() == before
        assert ledger.counts(before[0], ENVIRONMENT, SOURCE) == ()


def test_another_record_under_a_known_id_stops_the_whole_import(there, here, tmp_path):
    with Ledger.open(there) as ledger:
        known = ledger.evidence(verdict=Verdict.CRASH)[0]
    with Ledger.open(here) as ledger:
        ledger.add(replace(known, verdict=Verdict.PROVEN))
    with pytest.raises(UsageError, match=known.id):
        import_command(export(there, tmp_path / "other.jsonl"), None)
    with Ledger.open(here) as ledger:
        assert len(ledger.evidence()) == 1


@pytest.mark.parametrize(("id", "name"), [("", "x"), ("\x1b[2J", "x"), ("no", "x"), (None, " "), (None, "a\x1b[2J")])
def test_ids_and_names_that_are_none_are_refused_before_anything_is_added(there, here, id, name):
    with Ledger.open(there) as other, Ledger.open(here) as ledger:
        sent = other.evidence(origin="")
        with pytest.raises(UsageError) as raised:
            ledger.add_foreign((*sent, evidence() if id is None else evidence(id=id)), name)
        assert "\x1b" not in str(raised.value)
        assert ledger.evidence() == ()


BAD_LINES = {
    "not json": (b"{nonsense", "line 3: line"),
    "not utf-8": (b'{"evidence": "\xff\xfe"}', "line 3: line"),
    "a list": (b"[1, 2]", "line 3: line"),
    "nested without end": (b"[" * 100_000, "line 3: line"),
    "another kind": (b'{"gossip": {}}', "line 3: line"),
    "empty record": (b'{"evidence": {}}', "evidence.verdict: found nothing, expected one of proven, wrong"),
    "no object": (b'{"timing": 7}', "line 3: timing: found int"),
}
BAD_FIELDS = {
    "verdict": ("splendid", "evidence.verdict: found 'splendid'"),
    "tokens": (-1, "evidence.tokens: found -1, expected a whole number from 0"),
    "seconds": ("fast", "evidence.seconds: found 'fast', expected a number"),
    "environment": ({"driver": 570}, "evidence.environment"),
    "errors": ({"whole": 1}, "errors.limit_whole: found nothing"),
    "deterministic": (1, "evidence.deterministic: found 1, expected true or false or null"),
    "colour": ("red", "evidence: found an unknown field 'colour'"),
    "origin": ("someone", "evidence.origin: found 'someone'"),
    "id": (10**400, "evidence.id"),
}


def assert_refused(file, here, *texts):
    with pytest.raises(FormatError) as raised:
        import_command(file, None)
    for text in texts:
        assert text in str(raised.value)
    assert not (here / FILE).exists()
    assert len(str(raised.value)) < 20_000


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_line_that_cannot_be_read_is_named_and_nothing_is_imported(there, here, tmp_path, name):
    line, text = BAD_LINES[name]
    file = export(there, tmp_path / "other.jsonl")
    first, second, *rest = file.read_bytes().splitlines()
    file.write_bytes(b"\n".join([first, second, line, *rest]))
    assert_refused(file, here, "line 3", text, "nothing was imported")


@pytest.mark.parametrize("field", BAD_FIELDS)
def test_a_field_that_is_wrong_is_named_with_its_line(there, here, tmp_path, field):
    value, text = BAD_FIELDS[field]
    file = export(there, tmp_path / "other.jsonl")
    lines = file.read_text().splitlines()
    record = json.loads(lines[1])
    record["evidence"][field] = value
    file.write_text("\n".join([lines[0], json.dumps(record), *lines[2:]]))
    assert_refused(file, here, "line 2", text)


def test_many_bad_lines_are_counted_not_all_printed(there, here, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"form": "muster-ledger", "version": 1, "name": "x"}) + "\nrubbish" * 5000)
    assert_refused(file, here, "line 2", "line 21", "4980 that are wrong")


@pytest.mark.parametrize(
    "content", [b"", b"\n", b"hello", b'{"form": "muster-ledger", "version": 2, "name": "x"}', b"{}"]
)
def test_a_file_of_another_kind_is_refused(here, tmp_path, content):
    (tmp_path / "other").write_bytes(content)
    assert_refused(tmp_path / "other", here, "line 1")


def test_a_file_that_is_not_there_or_torn_is_a_named_error(here, tmp_path):
    with pytest.raises(InputError, match="no such file"):
        import_command(tmp_path / "nowhere", None)
    (tmp_path / "torn.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 3000)
    with pytest.raises(InputError, match=r"torn\.sqlite"):
        import_command(tmp_path / "torn.sqlite", None)
    assert not (here / FILE).exists()


@pytest.mark.parametrize("verdict", list(Verdict))
@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize("errors", [None, Errors(math.inf, math.nan, None, None, 1e-6, 3e-6)])
def test_traces_have_the_fields_that_their_status_asks_for(verdict, timed, errors):
    """The rules of the schema's own validators: which of correctness and performance each status must have."""
    row = evidence(verdict=verdict, errors=errors)
    found = traces.trace(row, timing(row) if timed else None)
    refused = verdict in (Verdict.DECLINED, Verdict.MISSING, Verdict.NOT_TRIED)
    if refused or (verdict is Verdict.PROVEN and not timed):
        assert found is None
        return
    assert found is not None
    assert set(found) == {"definition", "workload", "solution", "evaluation"}
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    evaluation = found["evaluation"]
    status = evaluation["status"]
    assert (evaluation["performance"] is not None) == (status == "PASSED") == (verdict is Verdict.PROVEN)
    assert (evaluation["correctness"] is not None) == (status in ("PASSED", "INCORRECT_NUMERICAL"))
    assert (status == "TIMEOUT") == (verdict is Verdict.HANG)
    assert evaluation["environment"]["hardware"] == "Some GPU"
    assert evaluation["environment"]["libs"]["driver"] == "570.1"
    assert found["workload"]["axes"] == {"num_tokens": row.tokens}
    if status == "PASSED":
        assert evaluation["performance"]["latency_ms"] == pytest.approx(0.2)
    if evaluation["correctness"] is not None:
        # Unknown is no zero: a reader of the schema takes "NaN" for a number that is not one.
        assert evaluation["correctness"]["max_relative_error"] == "NaN"
        assert evaluation["correctness"]["max_absolute_error"] == "NaN"


def muster(home, *arguments):
    environment = {**os.environ, "MUSTER_HOME": str(home), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "muster.cli", "ledger", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_list_says_of_each_why_it_does_not_count_and_never_hides_a_failure(there, monkeypatch, capsys):
    with Ledger.open(there) as ledger:
        failure = ledger.evidence(verdict=Verdict.HANG)[0]
        ledger.add(evidence(case=failure.case))
        ledger.add(evidence(case=failure.case))
    done = muster(there, "list")
    assert done.returncode == 0, done.stderr
    rows = [line for line in done.stdout.splitlines() if "device Some GPU then" in line]
    assert len(rows) == 7 + 2 + 1 + 1  # failures, proven cases, a time, a foreign verdict
    assert any(failure.id in row and "hang" in row for row in rows)
    assert "foreign: from a third machine" in done.stdout
    assert "1 older" in done.stderr
    assert "0 count here" in done.stderr
    assert "\x1b" not in done.stdout

    monkeypatch.setenv("MUSTER_HOME", str(there))
    list_command(Filter(), all=True, json=True)
    document = json.loads(capsys.readouterr().out)
    assert len(document["evidence"]) == 11
    assert not any(row["counts"] for row in document["evidence"])
    assert all(row["reasons"] for row in document["evidence"] + document["timings"])


def test_show_tells_everything_with_the_command_that_repeats_it(there, monkeypatch, capsys):
    monkeypatch.setenv("MUSTER_HOME", str(there))
    with Ledger.open(there) as ledger:
        row = ledger.evidence(verdict=Verdict.WRONG)[0]
    done = muster(there, "show", row.id[:8])
    assert done.returncode == 0, done.stderr
    for text in (row.repeat, row.source, "Infinity", "driver             570.1", r"saw wrong \udcff \x1b[31m in café"):
        assert text in done.stdout
    show_command(row.id, json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["errors"]["worst_token"] == "Infinity"
    assert document["repeat"] == row.repeat
    missing = muster(there, "show", "zz")
    assert missing.returncode == 2
    assert "none in" in missing.stderr


def test_exports_are_whole_files_of_json_lines_and_say_what_they_leave_out(there, tmp_path, monkeypatch, capsys):
    done = muster(there, "export", "--format", "flashinfer-bench", "-o", str(tmp_path / "traces.jsonl"))
    assert done.returncode == 0, done.stderr
    lines = (tmp_path / "traces.jsonl").read_text().splitlines()
    statuses = Counter(json.loads(line)["evaluation"]["status"] for line in lines)
    assert statuses == {"PASSED": 1, "INCORRECT_NUMERICAL": 3, "RUNTIME_ERROR": 3, "TIMEOUT": 1}
    monkeypatch.setenv("MUSTER_HOME", str(there))
    with Ledger.open(there) as ledger:
        ledger.add(evidence())
    export_command("flashinfer-bench", None)
    output = capsys.readouterr()
    assert output.out.splitlines() == lines
    assert "left out: 1 proven, no time" in output.err
    with pytest.raises(UsageError, match="flashinfer-bench"):
        export_command("csv", None)
    with pytest.raises(EnvironmentLackError, match="a file to write"):
        export_command("muster", tmp_path / "no" / "such" / "directory")
