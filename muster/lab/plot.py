"""Charts: rows of panels over token counts, every line labelled where it ends, failures marked where they happened."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from muster.errors import EnvironmentLackError, MusterError, UsageError

if TYPE_CHECKING:
    from muster.lab.measure.timing import Sample

SUFFIXES = (".png", ".svg", ".pdf")

_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#b8860b", "#56b4e9", "#7f3c8d", "#4d4d4d")
"""Told apart by colour-blind readers (after Okabe and Ito), dark enough for thin lines on white."""
_INK, _FAINT, _FLOOR = "#222222", "#d9d9d9", "#8a8a8a"
_PANEL_INCHES = (6.0, 3.3)
_LABEL_INCHES = 0.17
"""Distance that keeps two labels apart."""
_LANE = 0.12
"""Height of one backend's failures, as a part of the panel."""
_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"))


@dataclass(frozen=True)
class Curve:
    """One line of a panel.

    Attributes:
        name: its label; the same name has the same colour in every panel of a chart.
        points: y over x: token counts, or a rate.
        band: what lies around it, low and high over x.
        marks: x where there is no value because something failed, and the word for it.
        reference: what the others are held against: grey and dashed.
        foreign: not one of ours: dashed in its colour.
    """

    name: str
    points: Mapping[int, float] | Mapping[float, float]
    band: Mapping[int, tuple[float, float]] = field(default_factory=dict)
    marks: Mapping[int, str] = field(default_factory=dict)
    reference: bool = False
    foreign: bool = False


@dataclass(frozen=True)
class Panel:
    """Curves over one x axis of powers of two.

    Attributes:
        title: what is shown.
        y: its quantity: "time" in seconds on a log scale, "share" from 0 to 1, or the label of a log scale.
        curves: the lines.
        x: label of the x axis.
    """

    title: str
    y: str
    curves: Sequence[Curve]
    x: str = "tokens"


@dataclass(frozen=True)
class Chart:
    """Rows of panels under one heading, with a note below that says where the figures are from."""

    heading: str
    rows: Sequence[Sequence[Panel]]
    note: str = ""

    def save(self, path: Path) -> None:
        """Writes it in the format of the file's suffix, whole or not at all.

        Raises:
            UsageError, EnvironmentLackError: as `check_can_save`.
        """
        check_can_save(path)
        partial = path.with_name(f".{path.name}")
        self.figure().savefig(partial, format=path.suffix[1:].lower(), dpi=160)
        partial.replace(path)

    def figure(self) -> Any:
        """The `matplotlib.figure.Figure`."""
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        columns = max(len(row) for row in self.rows)
        width, height = _PANEL_INCHES
        size = (columns * width, len(self.rows) * height + 0.9)
        figure = Figure(figsize=size, facecolor="white", layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12))
        figure.suptitle(self.heading, x=0.01, ha="left", fontsize=14, fontweight="bold", color=_INK)
        if self.note:
            figure.supxlabel(self.note, x=0.01, ha="left", fontsize=8.5, color=_FLOOR)
        colours = self._colours()
        grid = figure.subplots(len(self.rows), columns, squeeze=False)
        drawn = [pair for axes, row in zip(grid, self.rows, strict=True) for pair in zip(axes, row, strict=False)]
        for ax, panel in drawn:
            _draw(ax, panel, colours)
        for ax in set(grid.flat) - {ax for ax, _ in drawn}:
            ax.set_axis_off()
        figure.draw_without_rendering()  # lays it out: labels are kept apart by their distance on the page
        for ax, panel in drawn:
            _label(ax, panel, colours)
        return figure

    def _colours(self) -> Mapping[str, str]:
        curves = (curve for row in self.rows for panel in row for curve in panel.curves if not curve.reference)
        names = dict.fromkeys(curve.name for curve in curves)
        return {name: _COLOURS[number % len(_COLOURS)] for number, name in enumerate(names)}


@dataclass(frozen=True)
class Track:
    """What is known of one backend on one part.

    Attributes:
        backend: its name.
        times: by token count.
        failures: by token count, the verdict of those that failed.
    """

    backend: str
    times: Mapping[int, Sample]
    failures: Mapping[int, str] = field(default_factory=dict)


def timing_panels(title: str, tracks: Sequence[Track], floors: Mapping[int, float]) -> tuple[Panel, Panel]:
    """Time, and share of the floor, over tokens.

    Args:
        title: the part's name.
        tracks: its backends.
        floors: seconds that the hardware allows at least, by token count.
    """
    times, shares = [Curve("floor", floors, reference=True)], []
    for track in tracks:
        points = {tokens: sample.median for tokens, sample in track.times.items()}
        band = {tokens: (sample.low, sample.high) for tokens, sample in track.times.items()}
        share = {tokens: floors[tokens] / median for tokens, median in points.items()}
        share_band = {tokens: (floors[tokens] / high, floors[tokens] / low) for tokens, (low, high) in band.items()}
        times.append(Curve(track.backend, points, band, track.failures))
        shares.append(Curve(track.backend, share, share_band))
    return Panel(title, "time", times), Panel("share of the floor: 100% is all the hardware allows", "share", shares)


def check_can_save(path: Path) -> None:
    """Whether a chart can be written there: to be asked before the work that it is to show.

    Raises:
        UsageError: another kind of file, or no such directory.
        EnvironmentLackError: matplotlib is not installed.
    """
    problems: list[MusterError] = []
    if path.suffix.lower() not in SUFFIXES:
        problems.append(UsageError("--plot", found=f"{path}", expected=f"a name that ends in {', '.join(SUFFIXES)}"))
    if not path.parent.is_dir():
        problems.append(UsageError("--plot", found=f"no directory {path.parent}", expected="one that exists"))
    error = UsageError.only_or_all("--plot", problems)
    if error is not None:
        raise error
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentLackError(
            "--plot", found="no matplotlib", expected="it installed", hint="pip install 'muster-moe[plot]'"
        )


def _draw(ax: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    _axes(ax, panel)
    for curve in panel.curves:
        _line(ax, curve, _FLOOR if curve.reference else colours[curve.name])
    failed = [curve for curve in panel.curves if curve.marks]
    _limits(ax, panel, lanes=len(failed))
    for lane, curve in enumerate(failed):
        _failures(ax, curve, colours[curve.name], _LANE * (lane + 0.3))


def _axes(ax: Any, panel: Panel) -> None:
    ax.set_title(panel.title, loc="left", fontsize=10.5, color=_INK)
    ax.set_xlabel(panel.x, fontsize=9, color=_INK)
    ax.set_xscale("log", base=2)
    ax.set_yscale("linear" if panel.y == "share" else "log")
    if panel.y not in ("time", "share"):
        ax.set_ylabel(panel.y, fontsize=9, color=_INK)
    ax.grid(axis="y", color=_FAINT, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.tick_params(which="both", labelsize=9, color=_FAINT, labelcolor=_INK)
    ax.tick_params(which="minor", length=0)
    for side in ("top", "right", "left"):
        ax.spines[side].set_visible(False)
    ax.spines["bottom"].set_color(_FLOOR)


def _line(ax: Any, curve: Curve, colour: str) -> None:
    x, y = zip(*sorted(curve.points.items()), strict=True) if curve.points else ((), ())
    style: dict[str, Any] = {"linewidth": 1.9, "marker": "o", "markersize": 4.2, "zorder": 3}
    if curve.reference:
        style = {"linewidth": 1.3, "linestyle": (0, (4, 2)), "zorder": 2}
    elif curve.foreign:
        style |= {"linewidth": 1.5, "linestyle": (0, (5, 1.5)), "markersize": 3.2}
    ax.plot(x, y, color=colour, label=curve.name, gid=f"line {curve.name}", **style)
    banded = sorted(curve.band)
    if banded:
        low, high = ([curve.band[each][side] for each in banded] for side in (0, 1))
        ax.fill_between(banded, low, high, color=colour, alpha=0.18, linewidth=0)


def _limits(ax: Any, panel: Panel, lanes: int) -> None:
    """Room for the labels on the right and for lanes of failures at the bottom; ticks at the token counts."""
    from matplotlib.ticker import FuncFormatter, NullLocator, PercentFormatter

    counts = sorted({x for curve in panel.curves for x in (*curve.points, *curve.marks)})
    if counts:
        span = max(counts[-1] / counts[0], 2.0)
        ax.set_xlim(counts[0] / span**0.04, counts[-1] * span**0.22)
        ax.set_xticks(counts, [f"{count:g}" if isinstance(count, float) else f"{count}" for count in counts])
    ax.xaxis.set_minor_locator(NullLocator())
    room = lanes * _LANE + (0.03 if lanes else 0.0)
    if panel.y == "share":
        highest = max((high for curve in panel.curves for high in curve.points.values()), default=1.0)
        top = max(1.0, highest) * 1.04
        ax.set_ylim(-top * room / (1 - room), top)
        ax.set_yticks([0, 0.25, 0.5, 0.75, 1.0])
        ax.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.axhline(1.0, color=_FLOOR, linewidth=1.3, linestyle=(0, (4, 2)), zorder=2)
        return
    low, high = ax.get_ylim()
    ax.set_ylim(low / (high / low) ** (room / (1 - room)), high)
    if panel.y == "time":
        ax.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: _tick(seconds)))
        ax.yaxis.set_minor_locator(NullLocator())


def _failures(ax: Any, curve: Curve, colour: str, y: float) -> None:
    """A cross at each token count, and above them what happened where."""
    place = ax.get_xaxis_transform()
    x = sorted(curve.marks)
    style: dict[str, Any] = {"linestyle": "none", "marker": "x", "markersize": 6, "markeredgewidth": 1.8, "zorder": 4}
    ax.plot(x, [y] * len(x), color=colour, transform=place, gid=f"failures {curve.name}", **style)
    first, last = ax.get_xlim()
    left = x[0] < first ** (2 / 3) * last ** (1 / 3)
    words: dict[str, list[int]] = {}
    for tokens in x:
        words.setdefault(curve.marks[tokens], []).append(tokens)
    happened = ", ".join(f"{word} at {', '.join(map(str, counts))}" for word, counts in words.items())
    ax.annotate(
        f"{curve.name}: {happened}",
        (x[0] if left else x[-1], y),
        xycoords=place,
        xytext=(-3 if left else 3, 6),
        textcoords="offset points",
        ha="left" if left else "right",
        fontsize=8.5,
        color=colour,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.8},
    )


def _label(ax: Any, panel: Panel, colours: Mapping[str, str]) -> None:
    """Each curve's name behind its last point; names that would touch are moved apart."""
    ends = []
    for curve in panel.curves:
        if curve.points:
            end = max(curve.points.items())
            ends.append((ax.transData.transform(end)[1], end, curve))
    ends.sort(key=lambda end: end[0])
    gap = _LABEL_INCHES * ax.figure.dpi
    at = -float("inf")
    for place, end, curve in ends:
        at = max(place, at + gap)
        ax.annotate(
            curve.name,
            end,
            xytext=(8, (at - place) * 72 / ax.figure.dpi),
            textcoords="offset points",
            va="center",
            fontsize=9.5,
            color=_FLOOR if curve.reference else colours[curve.name],
            fontweight="normal" if curve.reference else "bold",
        )


def _tick(seconds: float) -> str:
    size, unit = next((each for each in _UNITS if seconds >= 0.999 * each[0]), _UNITS[-1])
    return f"{seconds / size:.3g} {unit}"
