"""The table of GPUs: every figure has a source, names are forgiving, and this machine is measured."""

import math

import pytest

from muster.device import COMPUTE_CAPABILITIES
from muster.errors import UsageError
from muster.lab.explain.gpus import GPUS, Gpu, gpu, this_machine


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("rtx-pro-6000", "RTX PRO 6000"),
        ("rtx_pro_6000", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "RTX PRO 6000"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000 Server"),
        ("5090", "RTX 5090"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("gb10", "GB10"),
        ("DGX Spark", "GB10"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("AMD Instinct MI300X", "MI300X"),
    ],
)
def test_a_gpu_is_found_however_its_name_is_written(name: str, found: str) -> None:
    assert gpu(name).name == found


@pytest.mark.parametrize("name", ["", "H100 PCIe", "NVIDIA A100-SXM4-40GB", "RTX 3090", "h20"])
def test_another_gpu_is_not_taken_for_one_that_is_known(name: str) -> None:
    with pytest.raises(UsageError) as error:
        gpu(name)
    assert all(entry.name in str(error.value) for entry in GPUS)


def test_the_gpus_that_were_promised_are_there() -> None:
    for name in ("H100", "H200", "B200", "B300", "GB10", "RTX PRO 6000", "RTX 5090", "4090", "A100", "L40S", "MI300X"):
        assert gpu(name)


@pytest.mark.parametrize("entry", GPUS, ids=lambda entry: entry.name)
def test_every_figure_has_a_source(entry: Gpu) -> None:
    figures = {"memory", "reserved", "bandwidth", "rates", "shared_memory"}
    figures |= {"measured_bandwidth"} if entry.measured_bandwidth is not None else set()
    assert figures <= entry.sources.keys()
    assert all(entry.sources.values())
    assert "bandwidth" in entry.link.source
    assert "latencies" in entry.link.source


@pytest.mark.parametrize("entry", GPUS, ids=lambda entry: entry.name)
def test_figures_are_dense_and_in_bytes_and_seconds(entry: Gpu) -> None:
    assert entry.device in (*COMPUTE_CAPABILITIES, "gfx942")
    assert 20e9 < entry.budget < entry.memory < 300e9
    assert 0.2e12 < entry.bandwidth <= 8e12
    assert (entry.measured_bandwidth or 0) <= entry.bandwidth
    assert 1e14 < entry.rates["bf16"] < 3e15
    for narrow, wide in (("fp8", "bf16"), ("fp4", "fp8")):
        if narrow in entry.rates:
            assert entry.rates[narrow] >= 1.9 * entry.rates[wide]
    # No more than one multiplication per cycle and lane: sparse figures would break this at a clock of 3.2 GHz.
    assert entry.rates["bf16"] / entry.multiprocessors < 3.2e9 * 2 * 4096
    assert 0 < entry.link.start < 1e-4
    assert 1e10 < entry.link.bandwidth < 1e12


@pytest.mark.parametrize("entry", GPUS, ids=lambda entry: entry.name)
def test_tensor_cores_are_those_of_the_generation(entry: Gpu) -> None:
    major = 0 if entry.device.startswith("gfx") else int(entry.device.partition(".")[0])
    assert ("fp4" in entry.rates) == (major >= 10)
    assert ("fp8" in entry.rates) == (entry.device != "8.0")


def test_the_figures_that_floors_rest_on() -> None:
    assert gpu("h200").bandwidth == 4.8e12
    assert gpu("rtx pro 6000").bandwidth == 1.792e12
    assert gpu("h200").memory == 143_771 << 20
    assert gpu("rtx pro 6000").shared_memory == 100 << 10
    assert gpu("h200").link.bandwidth == 450e9


def test_a_machine_with_unified_memory_keeps_some_for_its_system() -> None:
    assert [entry.name for entry in GPUS if entry.unified] == ["GB10"]
    assert gpu("gb10").reserved > gpu("h200").reserved


def test_this_machine_is_measured(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(tmp_path))
    here = this_machine()
    assert here.bandwidth == here.measured_bandwidth
    assert 1e9 < here.bandwidth < 1e13
    assert math.isfinite(here.rates["bf16"])
    assert here.rates["bf16"] > 1e8
    assert 0 < here.budget <= here.memory
    assert "measured here" in here.sources["bandwidth"]
    assert "measured here" in here.sources["rates"]
