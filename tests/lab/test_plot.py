"""Charts: every backend has its line, every failure its cross, and the file is a whole picture or none."""

import itertools
import struct
import sys
import zlib
from pathlib import Path

import pytest

from muster.errors import EnvironmentLackError, UsageError
from muster.lab.measure.timing import Sample
from muster.lab.plot import Chart, Curve, Panel, Track, check_can_save, timing_panels

pytest.importorskip("matplotlib")

TOKENS = (1, 2, 4, 8)
FLOORS = {tokens: 1e-5 * tokens for tokens in TOKENS}


def sample(median: float) -> Sample:
    return Sample(median, 0.9 * median, 1.1 * median, 20)


def chart() -> Chart:
    tracks = [
        Track("cpu", {tokens: sample(2e-5 * tokens) for tokens in TOKENS}),
        Track("toy", {1: sample(5e-5)}, {2: "wrong", 4: "wrong", 8: "crash"}),
        Track("never", {}, dict.fromkeys(TOKENS, "nan")),
    ]
    quiet = [Track("cpu", {tokens: sample(4e-5 * tokens) for tokens in TOKENS})]
    rows = [timing_panels("experts", tracks, FLOORS), timing_panels("linears", quiet, FLOORS)]
    return Chart("demo", rows, "a note")


def line(ax, gid: str):
    (found,) = [each for each in ax.lines if each.get_gid() == gid]
    return found


def test_every_backend_has_a_line_of_its_medians() -> None:
    time, share, *_ = chart().figure().axes
    assert dict(zip(*line(time, "line cpu").get_data(), strict=True)) == {t: 2e-5 * t for t in TOKENS}
    assert line(share, "line cpu").get_ydata().tolist() == pytest.approx([0.5] * 4)
    assert dict(zip(*line(time, "line floor").get_data(), strict=True)) == FLOORS


def test_lines_of_others_are_dashed_in_their_colour() -> None:
    curves = [Curve("ours", {1: 0.5, 2: 0.6}), Curve("theirs", {1: 0.4, 2: 0.5}, foreign=True)]
    (ax,) = Chart("demo", [[Panel("share", "share", curves)]]).figure().axes
    assert line(ax, "line ours").get_linestyle() == "-"
    assert line(ax, "line theirs").get_linestyle() == "--"
    assert line(ax, "line theirs").get_color() != line(ax, "line ours").get_color()


def test_every_failure_has_a_cross_and_its_word() -> None:
    time = chart().figure().axes[0]
    assert line(time, "failures toy").get_xdata().tolist() == [2, 4, 8]
    assert line(time, "failures toy").get_marker() == "x"
    texts = [text.get_text() for text in time.texts]
    assert "toy: wrong at 2, 4, crash at 8" in texts
    assert "never: nan at 1, 2, 4, 8" in texts


def test_lines_and_crosses_do_not_touch() -> None:
    figure = chart().figure()
    figure.draw_without_rendering()
    ax = figure.axes[0]
    crosses = [y for each in ax.lines if str(each.get_gid()).startswith("failures") for y in each.get_ydata()]
    lowest = min(
        ax.transAxes.inverted().transform(ax.transData.transform((x, y)))[1]
        for each in ax.lines
        if str(each.get_gid()).startswith("line")
        for x, y in zip(*each.get_data(), strict=True)
    )
    assert max(crosses) + 0.05 < lowest


def test_labels_of_one_panel_do_not_touch() -> None:
    curves = [Curve(f"backend {i}", {1: 1e-5, 8: 1e-4 * (1 + i / 1000)}) for i in range(6)]
    figure = Chart("crowded", [[Panel("experts", "time", curves)]]).figure()
    figure.draw_without_rendering()
    boxes = sorted((text.get_window_extent() for text in figure.axes[0].texts), key=lambda box: box.y0)
    assert len(boxes) == 6
    assert all(below.y1 <= above.y0 + 1 for below, above in itertools.pairwise(boxes))


def test_a_backend_has_one_colour_in_the_whole_chart() -> None:
    axes = chart().figure().axes
    assert len({line(ax, "line cpu").get_color() for ax in axes}) == 1
    assert line(axes[0], "line cpu").get_color() != line(axes[0], "line toy").get_color()
    assert line(axes[0], "line toy").get_color() == line(axes[0], "failures toy").get_color()


def test_the_file_is_a_valid_png(tmp_path: Path) -> None:
    path = tmp_path / "bench.png"
    chart().save(path)
    data, at, kinds, pixels = path.read_bytes(), 8, [], b""
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    while at < len(data):
        (length,) = struct.unpack(">I", data[at : at + 4])
        kind, body = data[at + 4 : at + 8], data[at + 8 : at + 8 + length]
        (checksum,) = struct.unpack(">I", data[at + 8 + length : at + 12 + length])
        assert checksum == zlib.crc32(kind + body)
        kinds.append(kind)
        pixels += body if kind == b"IDAT" else b""
        at += 12 + length
    assert kinds[0] == b"IHDR"
    assert kinds[-1] == b"IEND"
    assert len(set(zlib.decompress(pixels))) > 10
    assert list(tmp_path.iterdir()) == [path]


def test_a_chart_without_any_time_can_be_drawn(tmp_path: Path) -> None:
    Chart("nothing", [timing_panels("experts", [], {})]).save(tmp_path / "empty.svg")
    assert (tmp_path / "empty.svg").read_text().startswith("<?xml")


def test_a_place_that_cannot_hold_a_picture_is_refused_with_every_reason(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        check_can_save(tmp_path / "none" / "bench.doc")
    assert "bench.doc" in str(error.value)
    assert ".png" in str(error.value)
    assert "no directory" in str(error.value)


def test_without_matplotlib_it_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(EnvironmentLackError, match=r"muster-moe\[plot\]") as error:
        check_can_save(tmp_path / "bench.png")
    assert error.value.exit_code == 3
