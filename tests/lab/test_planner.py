"""`muster plan` and the plans of `muster run`, by their real processes on a tiny checkpoint."""

import json
import signal

import pytest
from engine import tiny
from installed import install

from muster.lab.ledger.ledger import FILE, Ledger

from .commands import MISBEHAVING, SECONDS, Muster, first_line

ASK = ("--prompt", "hi", "--max-tokens", "4")
PROVING = "proven, "


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.save(tiny.mixtral().bfloat16(), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def planned(checkpoint, tmp_path_factory):
    """A home with a plan that was interrupted once, what was said then, and the document of the second go.

    The package of misbehaving backends is installed only after that.
    """
    home = tmp_path_factory.mktemp("home")
    muster = Muster(home)
    process = muster.start("plan", checkpoint, "--tokens", "1,8", "--json")
    first_line(process.stderr, "[1/")
    process.send_signal(signal.SIGINT)
    interrupted = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    document = muster.json("plan", checkpoint, "--tokens", "1,8")
    return Muster(home, install(MISBEHAVING, tmp_path_factory.mktemp("site"))), interrupted, document


def cases(muster):
    """The cases with evidence, by backend."""
    with Ledger.read(muster.home / FILE) as ledger:
        return [(row.backend, row.case) for row in ledger.evidence() if row.case]


def test_an_interrupted_plan_prints_nothing_and_goes_on_where_it_stopped(planned):
    muster, (out, err), _ = planned
    assert out == ""
    assert "the same command goes on" in err
    assert "saved" not in err
    assert len(cases(muster)) == len(set(cases(muster)))


def test_the_document_has_every_part_and_all_of_it_rests_on_evidence(planned, checkpoint):
    muster, _, document = planned
    assert document["proven"]
    assert document["model"] == str(checkpoint)
    roles = [key.split()[0] for key in document["parts"]]
    assert roles[0] == "experts"
    assert set(roles[1:]) == {"linears"}
    [file] = (muster.home / "plans").iterdir()
    assert json.loads(file.read_text()) == document
    with Ledger.read(muster.home / FILE) as ledger:
        for key, part in document["parts"].items():
            assert part["entries"][-1]["max_tokens"] is None
            for entry in part["entries"]:
                assert entry["reason"]
                proofs = [ledger.get(id) for id in entry["evidence"]]
                assert proofs
                assert {(row.part, row.backend, row.verdict.value) for row in proofs} == {
                    (key, entry["backend"], "proven")
                }
            assert all(loser["reasons"] for loser in part["losers"])


def test_a_plan_that_is_known_is_printed_without_proving(planned, checkpoint):
    muster, _, document = planned
    done = Muster(muster.home).run("plan", checkpoint, "--tokens", "1,8")
    assert done.returncode == 0
    assert PROVING not in done.stderr
    assert "saved as" in done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith(tuple(document["parts"]))]
    assert lines[1].split() == ["tokens", "backend", "cases", "of", "floor", "why"]
    rows = [line.split() for line in lines if line.startswith("  ")]
    entries = [entry for part in document["parts"].values() for entry in part["entries"]]
    shown = [(row[1], row[2]) for row in rows if row[0][0].isdigit()]
    assert shown == [(entry["backend"], str(len(entry["evidence"]))) for entry in entries]


def test_run_uses_the_plan_without_proving_and_says_in_a_line_what_won_what_lost_and_why(planned, checkpoint):
    muster, _, document = planned
    done = muster.run("run", checkpoint, *ASK)
    assert done.returncode == 0, done.stderr
    assert PROVING not in done.stderr
    closing, line = done.stderr.splitlines()[-2:]
    assert "tok/s" in closing
    assert "UNPROVEN" not in closing
    experts = next(iter(document["parts"].values()))
    assert line.startswith(f"experts: {experts['entries'][0]['backend']} for ")
    assert "; linears: " in line
    assert experts["entries"][0]["reason"] in line
    lost = [loser for loser in experts["losers"] if not loser["refuses"]]
    assert all(f"{loser['backend']} ({loser['reasons'][0]})" in line for loser in lost)
    answer = muster.json("run", checkpoint, *ASK)
    assert answer["proven"] is True
    assert answer["moe_backends"] == list(dict.fromkeys(entry["backend"] for entry in experts["entries"]))


def test_a_backend_that_fails_its_proof_is_refused_with_its_evidence(planned, checkpoint):
    muster, _, _ = planned
    refusals = [muster.run("run", checkpoint, *ASK, "--moe-backend", "wrong") for _ in range(2)]
    with Ledger.read(muster.home / FILE) as ledger:
        failures = [row.id for row in ledger.evidence(backend="wrong") if row.verdict.failed]
    for refusal in refusals:
        assert refusal.returncode == 1
        assert refusal.stdout == ""
        message = refusal.stderr[refusal.stderr.index("muster: ") :]
        assert message.startswith("muster: wrong is not proven")
        assert any(f"(evidence {id})" in message for id in failures)
        assert "--unproven" in message
    assert "wrong, T=1" in refusals[0].stderr
    assert "T=" not in refusals[1].stderr
    assert all(backend != "torch" or '"tokens": 64' not in case for backend, case in cases(muster))


def test_unproven_runs_it_all_the_same_and_every_output_is_marked(planned, checkpoint):
    muster, _, _ = planned
    before = cases(muster)
    done = muster.run("run", checkpoint, *ASK, "--moe-backend", "obedient", "--unproven")
    assert done.returncode == 0, done.stderr
    closing, line = done.stderr.splitlines()[-2:]
    assert closing.startswith("UNPROVEN: ")
    assert line.startswith("experts: obedient for any token count (asked for)")
    answer = muster.json("run", checkpoint, *ASK, "--moe-backend", "obedient", "--unproven")
    assert answer["proven"] is False
    assert answer["moe_backends"] == ["obedient"]
    assert cases(muster) == before


def test_even_unproven_a_model_that_computes_wrong_does_not_start(planned, checkpoint):
    muster, _, _ = planned
    done = muster.run("run", checkpoint, *ASK, "--moe-backend", "wrong", "--unproven")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "canary" in done.stderr


def test_a_backend_that_does_not_exist_is_bad_usage(planned, checkpoint):
    muster, _, _ = planned
    done = muster.run("run", checkpoint, *ASK, "--moe-backend", "tritno")
    assert done.returncode == 2
    assert "'tritno'" in done.stderr
    assert "torch" in done.stderr


def test_bad_options_of_plan_are_named_at_once(checkpoint, tmp_path):
    done = Muster(tmp_path).run("plan", checkpoint, "--tokens", "0", "--layout-budget", "-1")
    assert done.returncode == 2
    assert "'0'" in done.stderr
    assert "--layout-budget: found -1" in done.stderr
    assert not list(tmp_path.iterdir())


def test_run_proves_by_itself_where_there_is_no_evidence_and_does_so_once(checkpoint, tmp_path):
    muster = Muster(tmp_path)
    first = muster.run("run", checkpoint, *ASK)
    assert first.returncode == 0, first.stderr
    assert first.stderr.startswith("no plan for this checkpoint yet: ")
    assert PROVING in first.stderr
    [file] = (tmp_path / "plans").iterdir()
    assert json.loads(file.read_text())["proven"]

    second = muster.run("run", checkpoint, *ASK)
    assert second.returncode == 0
    assert second.stdout == first.stdout
    assert len(second.stderr.splitlines()) == 2

    asked = muster.run("run", checkpoint, *ASK, "--moe-backend", "torch")
    assert asked.returncode == 0
    assert asked.stdout == first.stdout
    assert PROVING not in asked.stderr
    assert "experts: torch for any token count (asked for" in asked.stderr
    assert [path.name for path in (tmp_path / "plans").iterdir()] == [file.name]
