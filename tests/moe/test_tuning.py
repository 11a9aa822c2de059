"""Tables of tile sizes: what is asked first, what stands in, what fits, and what a changed table changes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from muster.device import Device, cpu
from muster.errors import UsageError
from muster.formats.spec import BF16, FORMATS, FP8_BLOCK, FP8_CHANNEL, MXFP4, NVFP4, int4
from muster.lab.ledger.environment import current, differences
from muster.moe.kernels import tuning
from muster.moe.kernels.triton_tiles import (
    E4M3_TOKENS,
    SMALLEST_SHARED,
    TOKENS,
    Target,
    Tile,
    Tiles,
    by_rows,
    candidates,
    crossed,
    default,
)
from muster.moe.kernels.tuning import Cuts, Table, Tuning, shape_of
from muster.moe.problem import MoEProblem, RoutingRule

LAYER = MoEProblem(4096, 1024, 512, RoutingRule(10), 512, weights=NVFP4)
H200 = Device("9.0", "NVIDIA H200", 0, 132)
ROOM = 227 << 10
HOPPER = Target(TOKENS, NVFP4, H200.key, ROOM)
SMALL = Target(TOKENS, NVFP4, "8.9", SMALLEST_SHARED)
ODD = Tiles(32, 2, Tile(64, 64, 8, 2), Tile(32, 64, 4, 5))


def one(**fields: object) -> Tuning:
    usual = Tuning("triton", "nvfp4", "", None, ODD, 12.5, "a call", "a run")
    return replace(usual, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize("format", [BF16, NVFP4, MXFP4, FP8_BLOCK], ids=lambda entry: entry.name)
@pytest.mark.parametrize(
    ("slots", "rows"), [(1, 16), (16 * 512, 16), (16 * 512 + 1, 64), (96 * 512, 64), (1 << 20, 128)]
)
def test_the_packaged_table_of_an_h200_says_what_the_default_says(format, slots, rows, tmp_path) -> None:
    layer = replace(LAYER, weights=format)
    target = replace(HOPPER, weights=format)
    known = tuple(entry for entry in tuning.tunings(H200.name, tmp_path) if entry.fits(TOKENS, layer))
    expected = by_rows(64 if format is FP8_BLOCK and rows == 128 else rows, target)
    assert Cuts(layer, target, known).tuned
    assert Cuts(layer, target, known).tiles(slots) == Cuts(layer, target).tiles(slots) == expected
    assert Cuts(layer, target, known).of_rows(64) == by_rows(64, target)


def test_every_packaged_tuning_names_a_time_and_the_run_it_came_from() -> None:
    paths = sorted(tuning.PACKAGED.glob("*.json"))
    assert paths
    for path in paths:
        table = Table.read(path)
        assert path == tuning.PACKAGED / tuning._file(table.device)
        for entry in table.tunings:
            assert entry.microseconds > 0
            assert entry.at
            record = Path(tuning.PACKAGED.parents[3], entry.record.partition(",")[0])
            times = [json.loads(line)["microseconds"] for line in record.read_text().splitlines()]
            assert any(abs(time - entry.microseconds) < 0.1 for time in times), entry


def test_the_users_table_is_asked_first_then_one_of_the_very_shape_then_the_fewest_rows(tmp_path) -> None:
    shape = shape_of(LAYER)
    mine = [one(up_to=4.0, record="some"), one(shape=shape, up_to=8.0, record="own, 8"), one(shape=shape, up_to=2.0)]
    Table(H200.name, H200.key, tuple(mine)).write(tuning.own_path(tmp_path, H200.name))
    known = tuple(entry for entry in tuning.tunings(H200.name, tmp_path) if entry.fits("triton", LAYER))
    assert [entry.record for entry in known[:3]] == ["a run", "own, 8", "some"]
    assert [entry.up_to for entry in known[3:]] == [16, 96, None]
    cuts = Cuts(LAYER, HOPPER, known)
    assert cuts.tiles(8 * 512) == ODD
    assert cuts.tiles(8 * 512 + 1) == by_rows(16, HOPPER)
    other = replace(LAYER, inner=512)
    assert next(entry.record for entry in tuning.tunings(H200.name, tmp_path) if entry.fits("triton", other)) == "some"


def test_an_unknown_device_gets_the_default_and_says_that_it_is_untuned(tmp_path) -> None:
    assert tuning.tunings("NVIDIA L40S", tmp_path) == ()
    cuts = Cuts(LAYER, SMALL)
    assert not cuts.tuned
    assert cuts.tiles(1 << 20) == by_rows(64, SMALL), "128 rows do not fit there"
    assert tuning.digest("triton", "NVIDIA L40S", tmp_path) == "none"


@pytest.mark.parametrize("kernels", [TOKENS, E4M3_TOKENS])
@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda entry: entry.name)
@pytest.mark.parametrize(("capability", "shared"), [("8.9", SMALLEST_SHARED), ("8.0", 163 << 10), ("9.0", ROOM)])
@pytest.mark.parametrize("each", [0.02, 1.0, 16.0, 40.0, 500.0, 5000.0])
def test_every_candidate_fits_into_shared_memory_and_registers(kernels, format, capability, shared, each) -> None:
    target = Target(kernels, format, capability, shared)
    first, *others = candidates(target, each)
    assert first == default(target, each)
    assert others or shared == SMALLEST_SHARED
    around = [tiles for tiles in crossed((first, *others)[-1], target) if tiles != first]
    assert all(target.fits(tiles) for tiles in (*others, *around))
    assert all(2 * tile.half <= 128 for tiles in (first, *others, *around) for tile in (tiles.first, tiles.second))
    assert len(set(others)) == len(others)


@pytest.mark.parametrize(
    ("kernels", "weights", "capability", "rows"),
    [
        (TOKENS, BF16, "9.0", 128),
        (TOKENS, BF16, "8.0", 64),
        (TOKENS, NVFP4, "10.0", 64),
        (TOKENS, FP8_BLOCK, "9.0", 64),
        (TOKENS, int4(128), "9.0", 64),
        (TOKENS, FP8_CHANNEL, "9.0", 128),
        (E4M3_TOKENS, FP8_CHANNEL, "9.0", 64),
    ],
)
def test_blocks_of_128_rows_are_the_default_where_registers_hold_their_sums(kernels, weights, capability, rows) -> None:
    target = Target(kernels, weights, capability, ROOM)
    assert default(target, 1000.0).rows == rows
    assert target.partial != target.fits(by_rows(128, target))
    assert any(tiles.rows == 128 for tiles in candidates(target, 1000.0)), "a search may find narrower ones faster"


def test_a_table_survives_the_file_and_new_tunings_replace_those_of_their_shape_alone(tmp_path) -> None:
    shape = shape_of(LAYER)
    kept = one(weights="bf16"), one(kernels="others", shape=shape), one()
    table = Table("A GPU", "8.9", (*kept, one(shape=shape, up_to=1.0), one(shape=shape)))
    fresh = (one(shape=shape, up_to=3.5, microseconds=1.0),)
    changed = table.with_(fresh)
    assert changed.tunings == (*kept, *fresh)
    changed.write(tmp_path / "table.json")
    assert Table.read(tmp_path / "table.json") == changed
    assert len((tmp_path / "table.json").read_text().splitlines()) == len(changed.tunings) + 2


@pytest.mark.parametrize("text", ["", "[]", '{"device": "x", "capability": "9.0", "tunings": [{"rows": 16}]}', "\xff"])
def test_a_table_that_is_none_is_an_error_with_its_path(tmp_path, text) -> None:
    path = tuning.own_path(tmp_path, H200.name)
    path.parent.mkdir()
    path.write_text(text, encoding="latin-1")
    with pytest.raises(UsageError, match=r"nvidia-h200\.json"):
        tuning.tunings(H200.name, tmp_path)


def test_what_runs_with_other_sizes_needs_other_evidence_and_nothing_else_does(tmp_path) -> None:
    def environments() -> dict[str, dict[str, str]]:
        names = ("triton", "triton_fused", "triton_w8a8", "decode", "torch")
        return {name: dict(current(H200, "experts", name, tmp_path)) for name in names}

    before = environments()
    path = tuning.own_path(tmp_path, H200.name)
    Table(H200.name, H200.key, (one(microseconds=1.0),)).write(path)
    tuned = environments()
    changed = {name for name in before if differences(before[name], tuned[name])}
    assert changed == {"triton", "triton_fused"}
    Table(H200.name, H200.key, (one(microseconds=2.0, record="again"),)).write(path)
    assert environments() == tuned, "a time that changes no sizes changes no evidence"
    assert "tiles" not in current(H200, "linears", "triton", tmp_path)
    assert "tiles" not in current(cpu(), "experts", "torch", tmp_path)
