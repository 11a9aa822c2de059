"""The page about performance: every ratio is of one run, and only what is proven counts."""

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import performance
from performance import layers, newest, page, picture


def record(backend: str, microseconds: float, run: str = "first", tokens: int = 1, **more: object) -> dict:
    constant = {"gpu": "H", "torch": "2", "read_bandwidth": 4.5e12, "shape": "30B", "format": "nvfp4", "cold": True}
    times = {"microseconds": microseconds, "floor_microseconds": 5.0, "share": 5.0 / microseconds}
    who = {"backend": backend, "run": run, "tokens": tokens, "peer": backend.startswith("their"), "verdict": "proven"}
    return {**constant, **times, **who, **more}


def declined(backend: str, why: str) -> dict:
    given = record(backend, 1.0)
    return {name: given[name] for name in ("gpu", "torch", "read_bandwidth", "shape", "format", "backend", "run")} | {
        "verdict": "declined",
        "why": why,
    }


def text_of(*records: dict) -> str:
    return page(records, "records", "chart")


def test_the_best_of_ours_is_held_against_the_best_of_theirs() -> None:
    text = text_of(record("a", 10), record("b", 8), record("their a", 20), record("their b", 30))
    assert "| nvfp4, 30B | 2.50x (0.62) |" in text
    assert "| best of ours, times the best of theirs | 2.50x |" in text
    assert "| `b` | **8.0 (0.62)** |" in text


def test_a_ratio_is_never_of_two_runs() -> None:
    text = text_of(record("their a", 20), record("a", 10, run="second"))
    assert "| nvfp4, 30B | (0.50) |" in text
    assert "x (" not in text
    again = text_of(record("their a", 20), record("a", 10, run="second"), record("their a", 30, run="second"))
    assert "3.00x (0.50)" in again


@pytest.mark.parametrize("word", ["wrong", "nan", "crash"])
def test_what_is_not_proven_neither_wins_nor_is_beaten(word: str) -> None:
    bad = {"verdict": word}
    text = text_of(record("a", 10), record("b", 1, **bad), record("their a", 20), record("their b", 2, **bad))
    assert "| nvfp4, 30B | 2.00x (0.50) |" in text
    assert f"| `b` | {word} |" in text
    assert f"| `their b` | {word} |" in text


def test_what_took_no_part_is_named_until_it_does() -> None:
    assert "- nvfp4, 30B, `their a`: no compiler" in text_of(record("a", 10), declined("their a", "no compiler"))
    assert "no compiler" not in text_of(record("a", 10), declined("their a", "no compiler"), record("their a", 9))


def test_weights_that_may_have_come_from_the_cache_are_marked() -> None:
    assert "10.0* (0.50)" in text_of(record("a", 10, cold=False))
    assert "*" not in text_of(record("a", 10)).replace("**", "")


def test_a_later_measurement_takes_the_place_of_an_earlier_one() -> None:
    old, new, other = record("a", 10), record("a", 9, run="second"), record("a", 30, tokens=4)
    assert newest([old, other, new]) == [other, new]


def test_ours_come_before_theirs_on_the_page() -> None:
    (layer,) = layers([record("their a", 9), record("b", 10), record("a", 10)])
    assert layer.backends == ["b", "a", "their a"]


def test_the_picture_shows_proven_shares_and_marks_the_rest() -> None:
    several = [record("a", 10), record("a", 20, tokens=4, verdict="wrong"), record("their a", 25)]
    ((panel,),) = picture(several).rows
    ours, theirs = panel.curves
    assert (ours.points, ours.marks, ours.foreign) == ({1: 0.5}, {4: "wrong"}, False)
    assert (theirs.points, theirs.foreign) == ({1: 0.2}, True)


def test_all_three_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "results").mkdir()
    (tmp_path / "docs").mkdir()
    several = [record("a", 10), record("a", 9, run="second"), record("their a", 20, run="second")]
    (tmp_path / "results/gpu.jsonl").write_text("".join(json.dumps(one) + "\n" for one in several))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["performance.py", "results/gpu.jsonl", "docs/page.md"])
    performance.main()
    assert performance.read(Path("results/gpu.jsonl")) == several[1:]
    text = Path("docs/page.md").read_text()
    assert "(../results/gpu.svg)" in text
    assert "2.22x" in text
    assert Path("results/gpu.svg").read_text().rstrip().endswith("</svg>")
