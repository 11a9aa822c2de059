"""Writes docs/performance.md and its chart from the records of `scripts/bench_gpu.py`, and from nothing else.

python scripts/performance.py results/h200-experts.jsonl docs/performance.md

Lines of the records that a later run measured again are taken out of the file first.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from muster.lab.plot import Chart, Curve, Panel

Record = dict[str, Any]

HEAD = """# Performance of the expert layers

Written by `scripts/performance.py` from `{records}`; the measuring is `make bench-gpu`.
{machines}

Microseconds of the whole layer from routing to combined output, as medians of CUDA graph replays. Every call goes on
with another routing (uniform, drawn anew) and another copy of the weights, so many that none is found in the cache. In
brackets the share of the floor: the bytes of the experts touched over the bandwidth read in that run, or the operations
over the rate measured in it, whichever takes longer. Each cell was judged against the float64 reference before it was
timed; where the word is not "proven" it stands in place of the time. Of other engines we do not know every place where
they round, and the judge's limits are narrow: one whose output as a whole is within {close:.1%} of the reference counts
all the same, and `~` marks it. Their layers are made from the same codes and scales and take turns with ours on the
same clock; a ratio is always of two times of one run. `x` is how many times the speed of the fastest of them.
{warm}
![Share of the floor over tokens, one panel for each format and shape]({chart})
"""
WARM = "\n`*`: not over enough copies of the weights: some may have been found in the cache.\n"
CLOSE = 0.025
"""Relative RMS error of another engine's whole output up to which its time counts, whatever the judge says."""
ORDER = ("nvfp4", "mxfp4", "fp8-block", "bf16")
"""Of formats on the page."""


@dataclass(frozen=True)
class Layer:
    """What is known of one format and shape.

    Attributes:
        format, shape: which.
        measured: by backend and token count, the last record.
        rivals: by run and token count, the fastest peer of it whose time counts.
        declined: by backend, why it was not measured, where that is the last word.
    """

    format: str
    shape: str
    measured: dict[tuple[str, int], Record]
    rivals: dict[tuple[object, int], Record]
    declined: dict[str, str]

    @staticmethod
    def of(records: Sequence[Record]) -> Layer:
        """From the records of one format and shape, oldest first."""
        measured: dict[tuple[str, int], Record] = {}
        rivals: dict[tuple[object, int], Record] = {}
        declined: dict[str, str] = {}
        for record in records:
            if "tokens" not in record:
                declined[record["backend"]] = record["why"]
                continue
            declined.pop(record["backend"], None)
            measured[record["backend"], record["tokens"]] = record
            place = record["run"], record["tokens"]
            if record.get("peer") and _counts(record) and _microseconds(record) < _microseconds(rivals.get(place)):
                rivals[place] = record
        return Layer(records[0]["format"], records[0]["shape"], measured, rivals, declined)

    @property
    def tokens(self) -> list[int]:
        """Token counts that anything was measured at."""
        return sorted({tokens for _, tokens in self.measured})

    @property
    def backends(self) -> list[str]:
        """Ours, then peers, each in the order of the records."""
        peers = {backend: bool(record.get("peer")) for (backend, _), record in self.measured.items()}
        return sorted(peers, key=lambda name: peers[name])

    def best(self, tokens: int) -> Record | None:
        """Our fastest that is proven."""
        several = (record for (_, count), record in self.measured.items() if count == tokens)
        return min((r for r in several if _proven(r) and not r.get("peer")), key=_microseconds, default=None)

    def times(self, record: Record) -> float | None:
        """How many times as fast as the fastest peer of its run."""
        rival = self.rivals.get((record["run"], record["tokens"]))
        return None if rival is None else _microseconds(rival) / _microseconds(record)


def layers(records: Iterable[Record]) -> list[Layer]:
    """One for each format and shape, in the order of the page."""
    groups: dict[tuple[str, str], list[Record]] = {}
    for record in records:
        groups.setdefault((record["format"], record["shape"]), []).append(record)
    return sorted((Layer.of(group) for group in groups.values()), key=lambda one: ORDER.index(one.format))


def page(records: Sequence[Record], name: str, chart: str) -> str:
    """The page.

    Args:
        records: oldest first.
        name: of their file.
        chart: where the chart lies, seen from the page.
    """
    found = layers(records)
    warm = WARM if any(not record.get("cold", False) for record in records if "microseconds" in record) else ""
    parts = [HEAD.format(close=CLOSE, records=name, machines=_machines(records), warm=warm, chart=chart)]
    parts += ["## The best of ours beside the best of theirs", "", *_summary(found)]
    for layer in found:
        parts += ["", f"## {layer.format}, {layer.shape}", "", *_details(layer)]
    declined = [
        f"- {layer.format}, {layer.shape}, `{backend}`: {why}"
        for layer in found
        for backend, why in layer.declined.items()
    ]
    if declined:
        parts += ["", "## Not measured", "", *declined]
    return "\n".join(parts) + "\n"


def picture(records: Sequence[Record]) -> Chart:
    """Share of the floor over tokens, a panel for each format and shape."""
    found = layers(records)
    names = list(dict.fromkeys(name for layer in found for name in layer.backends))
    panels = [_panel(layer, [name for name in names if name in layer.backends]) for layer in found]
    rows = [panels[start : start + 2] for start in range(0, len(panels), 2)]
    heading = "Expert layers: share of the floor, ours solid, other engines' dashed"
    return Chart(heading, rows, _machines(records))


def newest(records: Sequence[Record]) -> list[Record]:
    """Without those that a later run measured again."""
    last = {_what(record): number for number, record in enumerate(records)}
    return [record for number, record in enumerate(records) if last[_what(record)] == number]


def _what(record: Record) -> tuple[object, ...]:
    return tuple(record.get(name) for name in ("format", "shape", "backend", "tokens"))


def _proven(record: Record) -> bool:
    return bool(record["verdict"] == "proven")


def _counts(record: Record) -> bool:
    """Proven, or another engine's and close to the reference."""
    return _proven(record) or bool(record.get("peer") and record.get("whole", float("inf")) <= CLOSE)


def _microseconds(record: Record | None) -> float:
    return float("inf") if record is None else float(record["microseconds"])


def _machines(records: Sequence[Record]) -> str:
    """GPUs, software and commits of the records."""
    gpus = dict.fromkeys(record["gpu"] for record in records)
    roofs = sorted({f"{record['read_bandwidth'] / 1e12:.2f}" for record in records})
    kinds = {"torch": "torch", "triton": "Triton", "vllm": "vLLM", "humming-kernels": "Humming", "driver": "driver"}
    software = [
        f"{title} {' and '.join(versions)}"
        for key, title in kinds.items()
        if (versions := list(dict.fromkeys(record[key] for record in records if key in record)))
    ]
    commits = list(dict.fromkeys(record["commit"] for record in records if "commit" in record))
    reads = roofs[0] if len(roofs) == 1 else f"{roofs[0]} to {roofs[-1]}"
    text = f"{' and '.join(gpus)}, reads {reads} TB/s; {', '.join(software)}"
    return f"{text}{'; commit ' if commits else ''}{' and '.join(commits)}."


def _summary(found: Sequence[Layer]) -> list[str]:
    counts = sorted({tokens for layer in found for tokens in layer.tokens})
    rows = (_row(f"{one.format}, {one.shape}", [_beside(one, tokens) for tokens in counts]) for one in found)
    return [_row("tokens", map(str, counts)), _row("---", ["---"] * len(counts)), *rows]


def _beside(layer: Layer, tokens: int) -> str:
    best = layer.best(tokens)
    if best is None:
        return ""
    times = layer.times(best)
    share = f"({best['share']:.2f})"
    return share if times is None else f"{times:.2f}x {share}"


def _details(layer: Layer) -> list[str]:
    """The floor, every backend, and who won; a column for each token count."""
    counts = layer.tokens
    best = {tokens: layer.best(tokens) for tokens in counts}
    lines = [_row("tokens", map(str, counts)), _row("---", ["---"] * len(counts))]
    for backend in layer.backends:
        cells = [layer.measured.get((backend, tokens)) for tokens in counts]
        lines.append(
            _row(
                f"`{backend}`", [_cell(record, record is best[record["tokens"]]) if record else "" for record in cells]
            )
        )
    winners = [(record, layer.times(record)) for record in best.values() if record is not None]
    if any(times is not None for _, times in winners):
        shown = {r["tokens"]: f"{times:.2f}x" for r, times in winners if times is not None}
        lines.append(_row("best of ours, times the best of theirs", [shown.get(tokens, "") for tokens in counts]))
    return lines


def _cell(record: Record, best: bool) -> str:
    if not _counts(record):
        return str(record["verdict"])
    marks = ("" if record.get("cold", False) else "*") + ("" if _proven(record) else "~")
    text = f"{_short(record['microseconds'])}{marks} ({record['share']:.2f})"
    return f"**{text}**" if best else text


def _short(microseconds: float) -> str:
    return f"{microseconds:.0f}" if microseconds >= 99.95 else f"{microseconds:.1f}"


def _row(title: str, cells: Iterable[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _panel(layer: Layer, backends: Sequence[str]) -> Panel:
    curves = []
    for backend in backends:
        several = {tokens: record for (name, tokens), record in layer.measured.items() if name == backend}
        points = {tokens: record["share"] for tokens, record in several.items() if _counts(record)}
        marks = {tokens: record["verdict"] for tokens, record in several.items() if not _counts(record)}
        foreign = any(record.get("peer") for record in several.values())
        curves.append(Curve(backend, points, marks=marks, foreign=foreign))
    return Panel(f"{layer.format}, {layer.shape}", "share", curves)


def read(path: Path) -> list[Record]:
    """The records of a file, oldest first."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    """Writes all three files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path)
    parser.add_argument("page", type=Path)
    given = parser.parse_args()
    source, target = given.records, given.page
    records = newest(read(source))
    source.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    chart = source.with_suffix(".svg")
    picture(records).save(chart)
    shown = os.path.relpath(chart, target.parent)
    target.write_text(page(records, f"{source}", shown), encoding="utf-8")


if __name__ == "__main__":
    main()
