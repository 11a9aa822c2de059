"""`muster verify` by its real process: verdicts, exit codes, resuming, several at once, and commands that repeat."""

import json
import os
import pty
import shlex
import signal
import subprocess
from dataclasses import asdict

import pytest
from installed import install

from muster.errors import InputError
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import FILE, Ledger
from muster.lab.prove.verify import command

from . import commands
from .commands import MISBEHAVING, SECONDS, Muster, first_line

EXPERTS = ("--role", "experts", "--tokens", "1,4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return commands.checkpoint(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def proven(checkpoint, tmp_path_factory):
    """A home where the experts have been proven, and what the command said of it."""
    muster = Muster(tmp_path_factory.mktemp("home"))
    return muster, muster.json("verify", checkpoint, *EXPERTS)


def standings(document):
    return {(one["backend"], one["tokens"]): one["verdict"] for part in document["parts"] for one in part["standings"]}


def evidence(muster):
    """All rows about cases, read by this process: a command for each look would cost seconds."""
    with Ledger.read(muster.home / FILE) as ledger:
        return [row for row in ledger.evidence() if row.case]


def test_every_backend_gets_a_verdict_for_every_token_count(proven):
    _, document = proven
    found = standings(document)
    assert {tokens for _, tokens in found} == {1, 4}
    assert all(found[name, tokens] == "proven" for name in ("torch", "cpu") for tokens in (1, 4))
    assert set(found.values()) <= {"proven", "declined", "missing"}
    assert document["proven"]
    assert document["cases"] == len(
        {id for part in document["parts"] for s in part["standings"] for id in s["evidence"]}
    )


def test_what_is_known_is_not_run_again_unless_asked(proven, checkpoint):
    muster, first = proven
    second = muster.json("verify", checkpoint, *EXPERTS)
    assert second["cases"] == 0
    assert standings(second) == standings(first)
    again = muster.json("verify", checkpoint, "--role", "experts", "--tokens", "1", "--backend", "torch", "--again")
    assert 0 < again["cases"] < first["cases"]


def test_the_repeat_command_of_evidence_repeats_it(proven, checkpoint):
    muster, document = proven
    [before] = {
        one["evidence"][0] for one in document["parts"][0]["standings"] if (one["backend"], one["tokens"]) == ("cpu", 4)
    }
    with Ledger.read(muster.home / FILE) as ledger:
        shown = ledger.get(before)
    program, *arguments = shlex.split(shown.repeat)
    assert program == "muster"
    repeated = muster.json(*arguments)
    assert repeated["cases"] == 1
    [standing] = repeated["parts"][0]["standings"]
    assert standing["evidence"] != [before]
    assert standing["worst"]["errors"] == asdict(shown.errors)
    assert standing["worst"]["case"] == shown.case


@pytest.mark.parametrize("end", [signal.SIGINT, signal.SIGKILL], ids=lambda end: end.name)
def test_interrupted_work_is_kept_and_goes_on(checkpoint, tmp_path, end):
    muster = Muster(tmp_path)
    arguments = ("verify", checkpoint, "--role", "experts", "--tokens", "1,2,3,4", "--backend", "torch")
    process = muster.start(*arguments, "--json")
    first = first_line(process.stderr, "[1/")
    total = int(first.partition("]")[0].partition("/")[2])
    process.send_signal(end)
    out, err = process.communicate(timeout=SECONDS)
    if end is signal.SIGINT:
        assert process.returncode == 130
        assert "the same command goes on" in err
        document = json.loads(out)
        assert document["interrupted"]
        assert not document["proven"]
    kept = len(evidence(muster))
    assert 1 <= kept < total
    rest = muster.json(*arguments)
    assert rest["cases"] == total - kept
    assert rest["proven"]
    cases = [row.case for row in evidence(muster)]
    assert len(cases) == len(set(cases)) == total


def test_two_at_once_do_not_disturb_each_other(checkpoint, tmp_path):
    muster = Muster(tmp_path)
    arguments = ("verify", checkpoint, "--role", "experts", "--tokens", "2", "--backend", "torch", "--json")
    both = [muster.start(*arguments) for _ in range(2)]
    outputs = [process.communicate(timeout=SECONDS) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    documents = [json.loads(out) for out, _ in outputs]
    assert standings(documents[0]) == standings(documents[1]) == {("torch", 2): "proven"}
    assert len(evidence(muster)) == sum(document["cases"] for document in documents)


@pytest.fixture(scope="module")
def misbehaving(checkpoint, tmp_path_factory):
    """What the command says of backends that fail, each in its own way, beside one that is right."""
    muster = Muster(tmp_path_factory.mktemp("home"), install(MISBEHAVING, tmp_path_factory.mktemp("site")))
    names = ("obedient", "wrong", "segfault", "picky", "absent")
    chosen = [word for name in names for word in ("--backend", name)]
    return muster, muster.run("verify", checkpoint, "--tokens", "4", *chosen)


def test_a_failing_backend_that_was_asked_for_is_answered_with_no_and_its_evidence(misbehaving):
    muster, done = misbehaving
    assert done.returncode == 1
    rows = {line.split()[0]: line for line in done.stdout.splitlines() if line.startswith("  ")}
    verdicts = {name: rows[name].split()[2] for name in ("obedient", "wrong", "segfault", "picky", "absent")}
    assert verdicts == {
        "obedient": "proven",
        "wrong": "wrong",
        "segfault": "crash",
        "picky": "declined",
        "absent": "missing",
    }
    assert "runs on 9.0, this is cpu" in rows["picky"]
    assert "no-such-package-as-this" in rows["absent"]
    refusal = done.stderr[done.stderr.index("muster: not proven") :]
    assert all(name in refusal for name in ("wrong", "segfault", "picky", "absent"))
    assert "obedient" not in refusal
    id = rows["wrong"].rpartition("(evidence ")[2].rstrip(")")
    with Ledger.read(muster.home / FILE) as ledger:
        assert ledger.get(id).verdict is Verdict.WRONG


def test_declines_and_missing_packages_are_evidence_and_recorded_once(misbehaving, checkpoint):
    muster, _ = misbehaving
    muster.run("verify", checkpoint, "--tokens", "4", "--backend", "picky", "--backend", "absent")
    with Ledger.read(muster.home / FILE) as ledger:
        rows = [(row.backend, row.verdict.value) for row in ledger.evidence() if not row.case]
    assert sorted(rows) == [("absent", "missing"), ("picky", "declined")]


def test_a_repeated_case_is_judged_by_what_it_shows_now(misbehaving, checkpoint):
    muster, _ = misbehaving
    case = next(row.case for row in evidence(muster) if row.backend == "obedient")
    document = muster.json("verify", checkpoint, "--case", case, "--backend", "obedient", "--backend", "wrong", code=1)
    assert standings(document) == {("obedient", 4): "proven", ("wrong", 4): "wrong"}
    assert document["cases"] == 2


def test_every_bad_option_is_named_at_once(checkpoint, tmp_path):
    muster = Muster(tmp_path)
    done = muster.run(
        "verify", checkpoint, "--backend", "nope", "--role", "drafts", "--tokens", "8,x,0", "--soak", "-1"
    )
    assert done.returncode == 2
    assert done.stdout == ""
    for word in (
        "--backend: found 'nope', expected one of cpu, ",
        "--role: found 'drafts'",
        "'x'",
        "'0'",
        "--soak: found -1",
    ):
        assert word in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"case": "{}"}, "--case: found '{}'"),
        ({"case": "{}", "tokens": "1"}, "--tokens: found --case beside it"),
        ({"role": "draft"}, "--role: found 'draft', expected what"),
        ({"backends": ["marlin"]}, "no adapter"),
        ({"soak": float("nan")}, "--soak"),
    ],
    ids=["no case", "case and tokens", "no such part", "known but not adapted", "no time"],
)
def test_a_question_that_makes_no_sense_is_refused(checkpoint, tmp_path, monkeypatch, arguments, complaint):
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    with pytest.raises(InputError) as refusal:
        command(checkpoint, **arguments)
    assert complaint in str(refusal.value)
    assert not list(tmp_path.iterdir())


def test_a_soak_goes_on_with_new_seeds_and_says_how_long(checkpoint, tmp_path):
    muster = Muster(tmp_path)
    options = ("--role", "experts", "--tokens", "1", "--backend", "torch", "--soak", "0.1")
    document = muster.json("verify", checkpoint, *options)
    assert document["seconds"] >= 6.0
    seeds = {json.loads(row.case)["seed"] for row in evidence(muster)}
    assert 0 in seeds
    assert len(seeds) == document["rounds"]


def test_a_terminal_gets_colours_and_a_pipe_gets_none(proven, checkpoint):
    muster, _ = proven
    arguments = ("verify", checkpoint, "--role", "experts", "--tokens", "1")
    piped = muster.run(*arguments)
    assert "\x1b" not in piped.stdout + piped.stderr
    terminal, end = pty.openpty()
    process = muster.start(*arguments, stdout=end, stderr=subprocess.PIPE)
    os.close(end)
    shown = b""
    while chunk := _read(terminal):
        shown += chunk
    assert process.wait(60) == 0
    assert b"\x1b[32mproven" in shown


def _read(terminal):
    """A terminal whose other side is closed ends with an error, not with nothing."""
    try:
        return os.read(terminal, 4096)
    except OSError:
        return b""
