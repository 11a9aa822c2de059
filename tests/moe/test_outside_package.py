"""A package of someone else's brings a backend through the entry-point group and passes the conformance suite."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from installed import install

PACKAGE = Path(__file__).parent / "outside_package"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install(PACKAGE, tmp_path_factory.mktemp("site"))


def python(site, *arguments):
    environment = {**os.environ, "PYTHONPATH": f"{site}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *arguments], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_outside_backend_passes_the_conformance_suite(site):
    suite = str(Path(__file__).with_name("test_conformance.py").relative_to(ROOT))
    done = python(site, "-m", "pytest", "-p", "no:cacheprovider", "-rs", "-k", "toy and not torch and not cpu", suite)
    assert done.returncode == 0, done.stdout[-3000:]
    passed = int(done.stdout.split(" passed")[0].split()[-1])
    assert passed > 100
    assert "takes no biases" in done.stdout


def test_outside_backend_is_listed_planned_and_run(site):
    program = """
import torch
from muster import device
from muster.plan import by_facts
from muster.moe.registry import backends
from tests.moe.cases import CASES, build
from muster.moe.layer import Gate, MoELayer

assert "toy" in backends().names()
assert "muster_toy" not in __import__("sys").modules, "imported before it was asked for"
case = CASES["format nvfp4"]
plan = by_facts(backends(), case.problem, device.cpu(), "toy", kind="expert-layer")
inputs = build(case, case.tokens)
layer = MoELayer(case.problem, Gate(torch.zeros(8, 128)), inputs.weights, plan, device.cpu())
layer(inputs.x_TD)
assert layer.backends_used == ("toy",)
print(plan.describe())
print(by_facts(backends(), case.problem, device.cpu(), kind="expert-layer").describe())
"""
    done = python(site, "-c", program)
    assert done.returncode == 0, done.stderr
    asked, automatic = done.stdout.splitlines()
    assert asked.startswith("toy for any token count (asked for)")
    assert "toy (" in automatic.split("lost:")[1]


def test_a_package_that_takes_a_name_of_ours_is_refused_by_its_name(site, tmp_path):
    other = tmp_path / "site"
    shutil.copytree(site, other)
    [points] = other.glob("*.dist-info/entry_points.txt")
    points.write_text(points.read_text() + "cpu = muster_toy\n")
    done = python(other, "-c", "from muster.moe.registry import backends; backends().names()")
    assert done.returncode == 1
    assert "'cpu': found muster.moe.backends.cpu and muster_toy of muster-toy 0.1, expected one owner" in done.stderr


@pytest.mark.parametrize("name", ["pyproject.toml", "muster_toy.py"])
def test_page_for_newcomers_shows_the_package_as_tested(name):
    page = (ROOT / "docs" / "adding-a-backend.md").read_text()
    assert (PACKAGE / name).read_text().strip() in page
