"""Plans on disk: found again as they were, and only while everything they rest on counts."""

import json
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from muster import device
from muster.errors import EnvironmentLackError
from muster.formats.spec import FORMATS
from muster.gemm.problem import LinearProblem
from muster.lab.choose.plans import VERSION, Shelf
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import Ledger
from muster.lab.prove.contender import Contender
from muster.lab.prove.parts import Part, Role
from muster.lab.prove.standing import Standings
from muster.moe.problem import MoEProblem, RoutingRule
from muster.plan import Choice, Loser, Plan, PlanEntry

from . import ledger_rows

EXPERTS = Part(
    Role.EXPERTS,
    MoEProblem(128, 64, 8, RoutingRule(2), 8, weights=FORMATS["nvfp4"], dtype="f32"),
    "model.layers.0.experts",
    2,
)
LINEARS = Part(Role.LINEARS, LinearProblem(64, 128, FORMATS["bf16"]), "model.layers.0.proj", 4)
PARTS = (EXPERTS, LINEARS)
MODEL = Path("/models/tiny")


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path) as opened:
        yield opened


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path, device.cpu())


@pytest.fixture
def add(ledger, shelf):
    """Adds evidence about a backend as it is here and now, and answers its id."""

    def add(part, backend, tokens, **changes):
        standings, contender = Standings(ledger, shelf.device), Contender(part, backend)
        row = ledger_rows.evidence(
            role=part.role.value,
            part=part.key,
            backend=backend,
            tokens=tokens,
            case=f"{part.key} {tokens}",
            environment=standings.environment(contender),
            source=standings.source(contender),
        )
        row = replace(row, **changes)
        ledger.add(row)
        return row.id

    return add


@pytest.fixture
def plan(add):
    """The experts by `cpu` up to 8 tokens and by `torch` above, the linears by `torch`; all of it proven."""
    few = PlanEntry(8, "cpu", "fastest", (add(EXPERTS, "cpu", 1), add(EXPERTS, "cpu", 8)), (1.5, 9.0), (0.25, 0.5))
    many = PlanEntry(None, "torch", "cpu is meant for up to 8 tokens", (add(EXPERTS, "torch", 64),))
    alone = PlanEntry(None, "torch", "the only one proven there", (add(LINEARS, "torch", 1),), of_floor=(0.75, 0.75))
    losers = (Loser("gpu", ("runs on 9.0", "reads nvfp4"), refuses=True), Loser("slow", ("takes 2.0x the time",)))
    choices = {
        (Role.EXPERTS, EXPERTS.problem): Choice((few, many), losers),
        (Role.LINEARS, LINEARS.problem): Choice((alone,), ()),
    }
    return Plan(MappingProxyType(choices), ("two layouts, for 3.0x",))


@pytest.fixture
def saved(shelf, plan):
    """The file of the saved plan."""
    return shelf.save(MODEL, PARTS, plan)


def test_a_saved_plan_is_found_as_it_was(shelf, ledger, plan, saved):
    found, reasons = shelf.find(MODEL, PARTS, ledger)
    assert reasons == ()
    assert found == plan
    assert found.describe() == plan.describe()
    assert found.proven
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_what_was_never_saved_is_not_found_and_needs_no_reason(shelf, ledger, saved):
    assert shelf.find(Path("/models/other"), PARTS, ledger) == (None, ())


def test_a_processor_has_a_plan_for_each_number_of_threads(shelf, ledger, saved, monkeypatch):
    monkeypatch.setenv("MUSTER_THREADS", "7")
    assert shelf.find(MODEL, PARTS, ledger) == (None, ())
    assert shelf.path(MODEL) != saved


def test_another_device_has_another_plan(tmp_path, saved):
    assert Shelf(tmp_path, replace(device.cpu(), name="another")).path(MODEL) != saved


def found_against(shelf, ledger):
    plan, reasons = shelf.find(MODEL, PARTS, ledger)
    assert plan is None
    return " | ".join(reasons)


def replaced(saved, old, new):
    saved.write_text(saved.read_text().replace(old, new))


def test_evidence_from_other_software_does_not_count(shelf, ledger, plan, saved, add):
    then = dict(Standings(ledger, shelf.device).environment(Contender(EXPERTS, "cpu")))
    old = add(EXPERTS, "cpu", 4, environment={**then, "torch": "1.0"})
    replaced(saved, plan.choice(Role.EXPERTS, EXPERTS.problem).entries[0].evidence[0], old)
    assert f"cpu: torch 1.0 then, {then['torch']} now" in found_against(shelf, ledger)


def test_evidence_about_another_source_does_not_count(shelf, ledger, plan, saved, add):
    old = add(LINEARS, "torch", 4, source="0" * 64)
    replaced(saved, plan.choice(Role.LINEARS, LINEARS.problem).entries[0].evidence[0], old)
    assert "torch: source 000000000000 then, " in found_against(shelf, ledger)


def test_evidence_of_another_machine_does_not_count(shelf, ledger, plan, saved, add):
    foreign = add(EXPERTS, "torch", 128, origin="elsewhere")
    replaced(saved, plan.choice(Role.EXPERTS, EXPERTS.problem).entries[1].evidence[0], foreign)
    assert "torch: foreign: from elsewhere" in found_against(shelf, ledger)


def test_evidence_that_the_ledger_lost_does_not_count(shelf, ledger, plan, saved):
    replaced(saved, plan.choice(Role.EXPERTS, EXPERTS.problem).entries[0].evidence[0], "abcdefabcdef")
    assert "cpu: evidence abcdefabcdef is not in" in found_against(shelf, ledger)


@pytest.mark.parametrize(("backend", "tokens"), [("cpu", 3), ("cpu", 0), ("torch", 9), ("torch", 5000)])
def test_a_new_failure_where_the_backend_runs_ends_the_plan(shelf, ledger, saved, add, backend, tokens):
    id = add(EXPERTS, backend, tokens, verdict=Verdict.WRONG, message="far off", case="another")
    assert f"{backend} has failed at {tokens} tokens: far off (evidence {id})" in found_against(shelf, ledger)


@pytest.mark.parametrize(("backend", "tokens"), [("cpu", 9), ("torch", 8), ("torch", 1)])
def test_a_new_failure_elsewhere_does_not_matter(shelf, ledger, plan, saved, add, backend, tokens):
    add(EXPERTS, backend, tokens, verdict=Verdict.CRASH, message="SIGSEGV", case="another")
    assert shelf.find(MODEL, PARTS, ledger) == (plan, ())


def test_a_newer_proof_of_the_same_case_does_not_end_the_plan(shelf, ledger, plan, saved, add):
    add(EXPERTS, "cpu", 1, date="2030-01-01T00:00:00+00:00")
    assert shelf.find(MODEL, PARTS, ledger) == (plan, ())


def test_a_part_that_the_plan_does_not_know_is_named(shelf, ledger, saved):
    other = replace(LINEARS, problem=replace(LINEARS.problem, rows=96))
    plan, reasons = shelf.find(MODEL, (*PARTS, other), ledger)
    assert plan is None
    assert reasons == (f"it has nothing for {other.key}",)


def test_a_backend_that_is_gone_is_named(shelf, ledger, saved):
    replaced(saved, '"backend": "cpu"', '"backend": "vanished"')
    assert "vanished is no longer installed" in found_against(shelf, ledger)


def spoilt(saved):
    """Contents that are no plan, by name."""
    text = saved.read_text()
    whole = json.loads(text)
    bounded, bare = json.loads(text), json.loads(text)
    bounded["parts"][LINEARS.key]["entries"][-1]["max_tokens"] = 8
    bare["parts"][LINEARS.key]["entries"][-1]["evidence"] = []
    return {
        "cut": text[: len(text) // 2],
        "empty": "",
        "a list": "[]",
        "parts that are a list": json.dumps({**whole, "parts": []}),
        "no remarks": json.dumps({name: value for name, value in whole.items() if name != "remarks"}),
        "an unknown field": text.replace('"reason"', '"raisin"'),
        "nothing above 8 tokens": json.dumps(bounded),
        "no evidence": json.dumps(bare),
    }


@pytest.mark.parametrize("way", range(8))
def test_a_damaged_file_is_told_of_and_replaced_by_the_next_plan(shelf, ledger, plan, saved, way):
    ways = spoilt(saved)
    assert len(ways) == 8
    saved.write_text(list(ways.values())[way])
    assert f"{saved} cannot be read" in found_against(shelf, ledger)
    shelf.save(MODEL, PARTS, plan)
    assert shelf.find(MODEL, PARTS, ledger) == (plan, ())


def test_bytes_that_are_no_text_are_told_of(shelf, ledger, saved):
    saved.write_bytes(b"\xff\xfe")
    assert "cannot be read: UnicodeDecodeError" in found_against(shelf, ledger)


def test_a_plan_of_another_version_is_not_read(shelf, ledger, saved):
    replaced(saved, f'"version": {VERSION}', f'"version": {VERSION + 1}')
    assert f"found version {VERSION + 1}, expected version {VERSION}" in found_against(shelf, ledger)


def test_a_place_that_cannot_be_written_is_named(shelf, plan, tmp_path):
    (tmp_path / "plans").write_text("in the way")
    with pytest.raises(EnvironmentLackError, match="MUSTER_HOME"):
        shelf.save(MODEL, PARTS, plan)
