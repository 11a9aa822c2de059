"""`muster bench` by its real process: times only what is proven, beside the floor, and keeps them."""

import signal

import pytest
from installed import install

from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import FILE, Ledger

from . import commands
from .commands import MISBEHAVING, Muster, first_line

OPTIONS = ("--role", "experts", "--tokens", "1,4")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return commands.checkpoint(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def timed(checkpoint, tmp_path_factory):
    """A home where two backends are proven and one is wrong, and the first bench there."""
    muster = Muster(tmp_path_factory.mktemp("home"), install(MISBEHAVING, tmp_path_factory.mktemp("site")))
    chosen = [word for name in ("torch", "cpu", "wrong") for word in ("--backend", name)]
    muster.run("verify", checkpoint, *OPTIONS, *chosen)
    return muster, muster.json("bench", checkpoint, *OPTIONS)


def times(document):
    return {(row["backend"], row["tokens"]): row for part in document["parts"] for row in part["timings"]}


def test_every_proven_backend_is_timed_beside_the_floor(timed):
    muster, document = timed
    found = times(document)
    assert found.keys() == {(name, tokens) for name in ("torch", "cpu") for tokens in (1, 4)}
    for (backend, tokens), row in found.items():
        assert 0 < row["low"] <= row["median"] <= row["high"]
        assert row["floor"] > 0
        with Ledger.read(muster.home / FILE) as ledger:
            proof = ledger.get(row["evidence"])
        assert (proof.backend, proof.tokens, proof.verdict) == (backend, tokens, Verdict.PROVEN)
    for tokens in (1, 4):
        assert [found[name, tokens]["mark"] for name in ("torch", "cpu")].count("fastest") == 1
        assert min(found[name, tokens]["ratio"] for name in ("torch", "cpu")) == 1.0


def test_what_is_wrong_gets_no_time_but_its_evidence(timed, checkpoint):
    muster, document = timed
    refused = {row["backend"]: row for row in document["parts"][0]["refused"]}
    assert refused["wrong"]["verdict"] == "wrong"
    assert "(evidence " in refused["wrong"]["why"]
    asked = muster.run("bench", checkpoint, *OPTIONS, "--backend", "wrong")
    assert asked.returncode == 1
    assert "wrong" in asked.stdout
    assert "expected proven" in asked.stderr


def test_times_are_kept_until_asked_for_again(timed, checkpoint):
    muster, first = timed
    options = ("--role", "experts", "--tokens", "1")
    known, again = (muster.json("bench", checkpoint, *options, *more) for more in ((), ("--again",)))
    assert times(known)["cpu", 1]["id"] == times(first)["cpu", 1]["id"]
    assert times(again)["cpu", 1]["id"] != times(first)["cpu", 1]["id"]


def test_the_table_has_a_row_for_every_time_and_every_refusal(timed, checkpoint):
    muster, _ = timed
    done = muster.run("bench", checkpoint, *OPTIONS)
    assert done.returncode == 0, done.stderr
    heading, columns, *rows = done.stdout.splitlines()
    assert heading.startswith("experts bf16")
    assert columns.split()[:3] == ["tokens", "backend", "median"]
    assert [tuple(row.split()[:2]) for row in rows[:4]] == sorted(
        (tuple(row.split()[:2]) for row in rows[:4]), key=lambda pair: int(pair[0])
    )
    assert any("wrong" in row and "(evidence " in row for row in rows[4:])
    assert any("picky" in row and "declined" in row for row in rows[4:])


def test_nothing_is_timed_without_evidence(checkpoint, tmp_path):
    document = Muster(tmp_path).json("bench", checkpoint, *OPTIONS, code=1)
    assert not times(document)
    refused = [row for part in document["parts"] for row in part["refused"] if row["backend"] in ("torch", "cpu")]
    assert {row["why"] for row in refused} == {f"no evidence: run muster verify {checkpoint}"}


def test_a_chart_is_drawn_from_the_times(timed, checkpoint, tmp_path):
    pytest.importorskip("matplotlib")
    muster, _ = timed
    path = tmp_path / "times.png"
    assert muster.run("bench", checkpoint, *OPTIONS, "--plot", path).returncode == 0
    assert path.read_bytes().startswith(b"\x89PNG")
    refused = muster.run("bench", checkpoint, *OPTIONS, "--plot", tmp_path / "times.exe")
    assert refused.returncode == 2
    assert "--plot" in refused.stderr


def test_interrupted_timing_keeps_what_is_finished(timed, checkpoint):
    muster, _ = timed
    process = muster.start("bench", checkpoint, *OPTIONS, "--again")
    first_line(process.stderr, "[1/2]")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command goes on" in err
    assert muster.run("bench", checkpoint, *OPTIONS).returncode == 0
