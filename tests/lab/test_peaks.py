"""Measured peaks: the read reads everything, the figures are plausible, and the best of one machine is kept."""

import json
from pathlib import Path

import numpy
import pytest
import torch

from muster import device, native
from muster.device import last_level_cache
from muster.formats.spec import BF16, NVFP4
from muster.lab.measure import peaks as module
from muster.lab.measure.bandwidth import read_bandwidth, xor_of_all
from muster.lab.measure.peaks import FILE, Peaks, measured, peaks
from muster.native.team import Team

CPU = torch.device("cpu")


@pytest.mark.skipif(not native.available(), reason="needs llvmlite")
@pytest.mark.parametrize("size", [0, 1, 255, 256, 100_003, 1 << 20])
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_read_kernel_reads_every_word_once(size: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        words = torch.randint(-(2**62), 2**62, (size,), generator=torch.Generator().manual_seed(size))
        expected = int(numpy.bitwise_xor.reduce(words.numpy(), initial=0))
        assert xor_of_all(words, Team()) == expected
        assert xor_of_all(words, Team(), alone=True) == expected
    finally:
        torch.set_num_threads(before)


def test_memory_is_read_at_a_plausible_rate() -> None:
    assert 1e9 < read_bandwidth(CPU, 0.1) < 2e12


def test_without_compiled_kernels_torch_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "available", lambda: False)
    assert 1e9 < read_bandwidth(CPU, 0.05) < 2e12


@pytest.mark.skipif(not Path("/sys/devices/system/cpu/cpu0/cache/index0").exists(), reason="needs Linux's sysfs")
def test_the_last_cache_is_larger_than_a_first_one() -> None:
    assert 1 << 18 <= last_level_cache(CPU) < 1 << 34


def test_the_best_figure_of_a_machine_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = iter([Peaks(5.0, {"f32": 1.0}), Peaks(3.0, {"f32": 2.0}), Peaks(7.0, {"f32": 1.5})])
    monkeypatch.setattr(module, "measured", lambda *_: next(looks))
    assert peaks(device.cpu(), tmp_path) == Peaks(5.0, {"f32": 1.0})
    assert peaks(device.cpu(), tmp_path) == Peaks(5.0, {"f32": 2.0})
    assert peaks(device.cpu(), tmp_path) == Peaks(7.0, {"f32": 2.0})
    assert len(json.loads((tmp_path / FILE).read_text())) == 1


def test_another_machine_starts_anew_and_the_first_is_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks = iter([Peaks(9.0, {}), Peaks(4.0, {}), Peaks(1.0, {})])
    monkeypatch.setattr(module, "measured", lambda *_: next(looks))
    first, threads = peaks(device.cpu(), tmp_path), torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        assert peaks(device.cpu(), tmp_path).read_bandwidth == 4.0
    finally:
        torch.set_num_threads(threads)
    assert peaks(device.cpu(), tmp_path) == first


@pytest.mark.parametrize("text", ["", "{", "[1]"])
def test_a_bad_file_is_measured_again(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / FILE).write_text(text)
    monkeypatch.setattr(module, "measured", lambda *_: Peaks(2.0, {}))
    assert peaks(device.cpu(), tmp_path) == Peaks(2.0, {})
    assert [entry["read_bandwidth"] for entry in json.loads((tmp_path / FILE).read_text()).values()] == [2.0]


def test_products_are_measured_at_a_plausible_rate() -> None:
    assert 1e8 < measured(CPU, 0.05).operations["f32"] < 1e14


def test_the_rate_is_that_of_what_a_kernel_may_multiply() -> None:
    rates = Peaks(1.0, {"f32": 1.0, "bf16": 10.0, "fp8": 20.0})
    assert rates.rate(BF16, "bf16") == 10.0
    assert rates.rate(NVFP4, "bf16") == 20.0, "activations may be rounded to fp8"
    assert rates.rate(NVFP4, "f32") == 1.0
    assert Peaks(1.0, {"f32": 1.0}).rate(BF16, "bf16") is None
