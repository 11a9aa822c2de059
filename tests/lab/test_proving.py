"""Backends of an outside package that misbehave on purpose: each gets its verdict, and nobody else notices."""

import json
import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import torch
from installed import install

from muster import device
from muster.lab.prove.proving import probe

from .test_isolate import processes

PACKAGE = Path(__file__).parent / "misbehaving"
ROOT = Path(__file__).parents[2]

PROGRAM = """
import json, os, sys, threading
from concurrent.futures import ThreadPoolExecutor
import torch
from muster import device
from muster.formats.spec import BF16
from muster.lab.prove.cases import Case, Part, Role
from muster.lab.prove.isolate import Limits
from muster.lab.prove.proving import prove
from muster.moe.problem import MoEProblem, RoutingRule

torch.set_num_threads(1)
problem = MoEProblem(32, 16, 4, RoutingRule(2), 4, weights=BF16, dtype="f32")
part = Part(Role.EXPERTS, problem, "drawn", 1)
lock = threading.Lock()

def run(job):
    backend, tokens, seconds = job
    def tell(finding):
        line = [finding.case.tokens, finding.verdict, finding.deterministic, finding.message, finding.seconds]
        with lock:
            print(json.dumps([backend, *line]), flush=True)
    cases = [Case(part, count, "uniform", 0) for count in tokens]
    here = device.cuda() if "ON_CUDA" in os.environ else device.cpu()
    prove(backend, cases, Limits(seconds, 4 << 30), tell, here=here)

with ThreadPoolExecutor(3) as pool:
    list(pool.map(run, json.loads(sys.argv[1])))
"""

SECONDS = 60
JOBS = [
    ("endless", [4], 20),
    ("obedient", [1, 4], SECONDS),
    ("segfault", [4, 5, 6, 7, 8], SECONDS),
    ("abort", [4], SECONDS),
    ("exit", [4], SECONDS),
    ("raiser", [4], SECONDS),
    ("greedy", [4], SECONDS),
    ("noisy", [4], SECONDS),
    ("forker", [4], SECONDS),
    ("partial", [4], SECONDS),
    ("overrun", [4], SECONDS),
    ("underrun", [4], SECONDS),
    ("vandal", [4, 6], SECONDS),
    ("nan", [4], SECONDS),
    ("wrong", [4], SECONDS),
    ("stale", [4], SECONDS),
    ("fickle", [4], SECONDS),
    ("perjurer", [4], SECONDS),
    ("picky", [4], SECONDS),
    ("absent", [4], SECONDS),
    ("importer", [4], SECONDS),
    ("moody", [2, 3, 4], SECONDS),
    ("saboteur", [4, 6], SECONDS),
    ("torch", [1, 4], SECONDS),
]

CUDA_JOBS = [(name, [4, 6], SECONDS) for name in ("graphed", "baked", "synchronous", "astray", "hog", "tiled", "torch")]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install(PACKAGE, tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def session(site, tmp_path_factory):
    """All of them proven by one process, three at a time, and what is left on the machine afterwards."""
    mark, scratch = str(uuid.uuid4()), tmp_path_factory.mktemp("scratch")
    found, stderr = prove_all(site, scratch, JOBS, MISBEHAVING_MARK=mark)
    return found, stderr, processes(mark), list(scratch.iterdir())


@pytest.fixture(scope="module")
def cuda_session(site, tmp_path_factory):
    found, _ = prove_all(site, tmp_path_factory.mktemp("scratch"), CUDA_JOBS, ON_CUDA="true")
    return found


def prove_all(site, scratch, jobs, **variables):
    environment = {
        **os.environ,
        "PYTHONPATH": f"{site}{os.pathsep}{ROOT}",
        "OMP_NUM_THREADS": "1",
        "MUSTER_THREADS": "1",
        "TMPDIR": str(scratch),
        **variables,
    }
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(jobs)],
        env=environment,
        cwd=scratch,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for backend, *finding in map(json.loads, done.stdout.splitlines()):
        found.setdefault(backend, []).append(finding)
    return found, done.stderr


@pytest.mark.parametrize(
    ("backend", "verdict", "message"),
    [
        ("segfault", "crash", "first run: SIGSEGV at "),
        ("abort", "crash", "first run: SIGABRT at misdeeds.py"),
        ("endless", "hang", "first run: no result in time at muster_misbehaving.py"),
        ("exit", "crash", "first run: exited with code 0 before there was a result"),
        ("raiser", "crash", r"first run: RuntimeError: \udcff\udcfe caf\udce9"),
        ("greedy", "out-of-memory", "first run: RuntimeError"),
        ("noisy", "proven", ""),
        ("forker", "proven", "2 processes that it had started were left and have been killed"),
        ("partial", "partial-write", "first run: 3 of 128 elements were never written"),
        ("overrun", "out-of-bounds", "first run: 3 elements before or after the output were written"),
        ("underrun", "out-of-bounds", "first run: 3 elements before or after the output were written"),
        ("nan", "nan", "first run: 1 of 128 elements are NaN or infinite"),
        ("wrong", "wrong", "first run: relative RMS 0.02 (limit "),
        ("stale", "nan", "second run: 128 of 128 elements are NaN or infinite"),
        ("perjurer", "wrong", "it declares to be deterministic and gave other bits the second time"),
        ("picky", "declined", "runs on 9.0, this is cpu"),
        ("absent", "missing", "needs no-such-package-as-this, which is not installed"),
        (
            "importer",
            "missing",
            "preparing the weights: ModuleNotFoundError: No module named 'no_such_library",
        ),
    ],
)
def test_a_misdeed_gets_its_verdict(session, backend, verdict, message):
    found, *_ = session
    _, got, _, said, _ = found[backend][0]
    assert got == verdict, said
    assert said.startswith(message)
    assert "\n" not in said


def test_right_backends_are_proven_before_and_after(session):
    found, *_ = session
    for backend in ("obedient", "torch"):
        assert [(tokens, verdict, same) for tokens, verdict, same, *_ in found[backend]] == [
            (1, "proven", True),
            (4, "proven", True),
        ]


def test_other_bits_each_time_are_recorded_and_no_fault_by_themselves(session):
    found, *_ = session
    ((_, verdict, deterministic, _, _),) = found["fickle"]
    assert (verdict, deterministic) == ("proven", False)


def test_a_death_costs_one_case(session):
    found, *_ = session
    verdicts = {tokens: verdict for tokens, verdict, *_ in found["moody"]}
    assert list(verdicts.items()) == [(2, "proven"), (3, "crash"), (4, "proven")]


def test_a_backend_that_spoils_its_inputs_spoils_no_later_case(session):
    found, *_ = session
    assert [(tokens, verdict, said) for tokens, verdict, _, said, _ in found["vandal"]] == [
        (tokens, "out-of-bounds", "it wrote into its inputs: x") for tokens in (4, 6)
    ]


def test_a_death_between_two_cases_is_blamed_on_the_one_before(session):
    found, *_ = session
    (first, *_, said, _), (second, verdict, *_) = found["saboteur"]
    assert found["saboteur"][0][1] == "crash"
    assert said.startswith("after the case was complete: SIGSEGV")
    assert (first, second, verdict) == (4, 6, "proven")


def test_every_case_has_one_finding_that_took_time(session):
    found, *_ = session
    assert {backend: [tokens for tokens, *_ in several] for backend, several in found.items()} == {
        backend: tokens for backend, tokens, _ in JOBS
    }
    assert all(took > 0 for several in found.values() for _, verdict, _, _, took in several if verdict != "not-tried")


def test_nothing_is_left_of_them(session):
    _, stderr, alive, files = session
    assert stderr == ""
    assert alive == []
    assert files == []


def test_after_three_failed_processes_the_rest_is_not_tried(session):
    found, *_ = session
    assert [verdict for _, verdict, *_ in found["segfault"]] == ["crash"] * 3 + ["not-tried"] * 2
    assert found["segfault"][-1][3] == "3 processes of this backend had failed"


def test_a_processor_answers():
    assert probe(device.cpu()) is None


@needs_cuda
@pytest.mark.parametrize(
    ("backend", "verdict", "message"),
    [
        ("graphed", "proven", ""),
        ("torch", "proven", ""),
        ("baked", "wrong", "graph replay: relative RMS"),
        ("synchronous", "crash", "graph replay: "),
        ("astray", "crash", "first run: "),
        ("hog", "out-of-memory", "first run: OutOfMemoryError: "),
        ("tiled", "out-of-bounds", "first run: 1920 elements before or after the output were written"),
    ],
)
def test_a_misdeed_on_a_gpu_gets_its_verdict(cuda_session, backend, verdict, message):
    assert [tokens for tokens, *_ in cuda_session[backend]] == [4, 6]
    _, got, _, said, _ = cuda_session[backend][0]
    assert got == verdict, said
    assert said.startswith(message)
    assert "no longer answers" not in said


@needs_cuda
def test_a_gpu_answers():
    assert probe(device.cuda()) is None
