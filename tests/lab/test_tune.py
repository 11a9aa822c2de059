"""`muster bench --tune` by its real process: what it finds is proven, then kept, and evidence depends on it."""

import pytest
from installed import install

from muster.device import Device, cpu, elsewhere
from muster.formats.spec import NVFP4
from muster.lab.measure.tune import remark
from muster.lab.prove.cases import Part, Role
from muster.lab.prove.contender import contenders
from muster.moe.kernels import tuning
from muster.moe.kernels.triton_tiles import SMALLEST_SHARED, Target, by_rows
from muster.moe.kernels.tuning import Table
from muster.moe.problem import MoEProblem, RoutingRule

from . import commands
from .commands import Muster

PACKAGE = commands.MISBEHAVING.with_name("tunable")
OPTIONS = ("--role", "experts", "--tokens", "1,4", "--backend", "tunable")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return commands.checkpoint(tmp_path_factory.mktemp("mixtral"))


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    return install(PACKAGE, tmp_path_factory.mktemp("site"))


def environments(muster):
    return {row["environment"]["tiles"] for row in muster.json("ledger", "list", "--all")["evidence"]}


def test_the_fastest_sizes_are_proven_saved_and_run_with(checkpoint, site, tmp_path):
    muster = Muster(tmp_path, site)
    assert muster.run("verify", checkpoint, *OPTIONS).returncode == 0
    before = muster.json("bench", checkpoint, *OPTIONS)
    assert environments(muster) == {"none"}

    tuned = muster.run("bench", checkpoint, *OPTIONS, "--tune")
    assert tuned.returncode == 0, tuned.stderr
    table = Table.read(tuning.own_path(tmp_path, cpu().name))
    assert [one.tiles.rows for one in table.tunings] == [32, 32]
    assert [one.up_to for one in table.tunings] == [pytest.approx(2 / 6), None]
    assert all(one.kernels == "tunable" and one.record.startswith("muster bench --tune") for one in table.tunings)
    assert environments(muster) == {"none", tuning.digest("tunable", cpu().name, tmp_path)}

    after = muster.json("bench", checkpoint, *OPTIONS)
    medians = [[row["median"] for row in document["parts"][0]["timings"]] for document in (before, after)]
    assert all(new < old - 0.005 for old, new in zip(*medians, strict=True))


def test_sizes_that_the_judge_rejects_are_not_kept(checkpoint, site, tmp_path, monkeypatch):
    monkeypatch.setenv("MUTANT", "1")
    tuned = Muster(tmp_path, site).run("bench", checkpoint, *OPTIONS, "--tune")
    assert tuned.returncode == 1
    assert "not saved" in tuned.stderr
    assert "relative RMS 0.02" in tuned.stderr
    assert not tuning.own_path(tmp_path, cpu().name).exists()


def test_where_nobody_takes_sizes_from_a_table_tuning_is_bad_usage(checkpoint, tmp_path):
    done = Muster(tmp_path).run("bench", checkpoint, "--tune", "--backend", "torch")
    assert done.returncode == 2
    assert "--tune: found none on" in done.stderr


def test_a_gpu_that_nobody_tuned_is_named_and_a_tuned_or_absent_one_is_not(tmp_path, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    layer = MoEProblem(4096, 1024, 512, RoutingRule(10), 512, weights=NVFP4)

    def said(device):
        return remark(device, contenders(Part(Role.EXPERTS, layer, "drawn", 1), device))

    assert said(Device("9.0", "NVIDIA H200", 0, 132)) == ""
    assert said(elsewhere("8.9")) == ""
    assert said(cpu()) == ""
    untuned = Device("8.9", "NVIDIA L40S", 0, 142)
    assert said(untuned).startswith("NVIDIA L40S is untuned for nvfp4 experts: triton and triton_fused run")
    tiles = by_rows(64, Target("triton", NVFP4, "8.9", SMALLEST_SHARED))
    own = tuning.Tuning("triton", "nvfp4", tuning.shape_of(layer), None, tiles, 1.0, "a call", "a run")
    Table(untuned.name, untuned.key, (own,)).write(tuning.own_path(tmp_path, untuned.name))
    assert said(untuned) == ""
