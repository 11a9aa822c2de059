"""The tables of `muster backends`: by backend, by part of a model, or a matrix over compute capabilities."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from muster.contract import NO_ADAPTER
from muster.device import Device
from muster.lab.explain.cells import Cell
from muster.lab.explain.offers import Offer
from muster.lab.explain.seen import Seen, Verdicts
from muster.lab.prove.parts import Role
from muster.lab.table import Column, Section, Table
from muster.moe.known import DISPATCHERS

PLAIN_LAYER = (
    "The layer: experts with silu, softmax routing, no biases, all on one rank, widths that suit every kernel; "
    "linears without a bias."
)


def write(cells: Sequence[Cell], verdicts: Verdicts, *, named: bool) -> None:
    """Writes the cells to stdout; `named`: they are of one model, not of the plain layer."""
    if len({cell.device.key for cell in cells}) > 1:
        _matrix(cells, named=named)
    elif named:
        _by_part(cells, verdicts)
    else:
        _by_backend(cells)


def rows(cells: Sequence[Cell], *, named: bool) -> Mapping[tuple[Role, str], Sequence[Cell]]:
    """Cells of the same part side by side, by role and what to call the part."""
    found: dict[tuple[Role, str], list[Cell]] = {}
    for cell in cells:
        label = cell.part.key.removeprefix(f"{cell.part.role.value} ") if named else cell.part.module
        found.setdefault((cell.part.role, label), []).append(cell)
    return found


def _matrix(cells: Sequence[Cell], *, named: bool) -> None:
    """Counts in a table, then the names; the reasons are left to a single compute capability and to --json."""
    devices = tuple(dict.fromkeys(cell.device.key for cell in cells))
    found = rows(cells, named=named)
    sections = [
        Section(role.value, [[label, *map(_count, row)] for (of, label), row in found.items() if of is role])
        for role in dict.fromkeys(role for role, _ in found)
    ]
    Table([Column("weights"), *(Column(key, right=True) for key in devices)], sections).write()
    _say("\nHow many backends run, and + how many could but have no adapter yet. They are, by compute capability:")
    for (role, label), row in found.items():
        _say(f"\n{role.value}, {label}")
        for names, same in groupby(row, key=_names):
            _say(f"  {', '.join(cell.device.key for cell in same)}: {names}")
    _say("" if named else f"\n{PLAIN_LAYER}")
    _say("Every refusal with all its reasons: --cc with one compute capability, or --json.")


def _count(cell: Cell) -> str:
    running = sum(offer.runs for offer in cell.offers)
    return f"{running} + {len(cell.possible) - running}"


def _names(cell: Cell) -> str:
    running = [f"{offer.backend} {offer.scheme}" for offer in cell.possible if offer.adapter]
    rest = [f"{offer.backend} {offer.scheme}" for offer in cell.possible if not offer.adapter]
    return f"{', '.join(running) or 'none'}; {NO_ADAPTER}: {', '.join(rest) or 'none'}"


def _by_backend(cells: Sequence[Cell]) -> None:
    """A line per backend: the formats it could compute, and every reason against the others that it reads."""
    sections = []
    for role in dict.fromkeys(cell.part.role for cell in cells):
        mine = [cell for cell in cells if cell.part.role is role]
        answers = [
            [(cell.part.module, offer) for cell in mine for offer in cell.offers if offer.backend == name]
            for name in dict.fromkeys(offer.backend for offer in mine[0].offers)
        ]
        answers.sort(key=lambda row: _rank(offer for _, offer in row))
        lines = [[row[0][1].backend, row[0][1].kind, _can(offer for _, offer in row), _formats(row)] for row in answers]
        sections.append(Section(f"{role.value} on {_title(mine[0].device)}", lines))
    Table((Column("backend"), Column("kind"), Column("can"), Column("formats, or every reason")), sections).write()
    device = cells[0].device
    able = [entry.name for entry in DISPATCHERS if any(device.key in path.devices for path in entry.paths)]
    _say(f"\nToken dispatchers for it, {NO_ADAPTER}: {', '.join(able) or 'none'}.\n{PLAIN_LAYER}")


def _title(device: Device) -> str:
    return f"{device.name} ({device.key})" if device.present else device.name


def _rank(offers: Iterable[Offer]) -> int:
    """Those that run first, then those that could."""
    return ("yes", NO_ADAPTER, "no").index(_can(offers))


def _can(offers: Iterable[Offer]) -> str:
    able = [offer for offer in offers if offer.possible]
    return "no" if not able else "yes" if able[0].adapter else NO_ADAPTER


def _formats(row: Sequence[tuple[str, Offer]]) -> str:
    able = [f"{label} {offer.scheme}" for label, offer in row if offer.possible]
    against: dict[str, list[str]] = {}
    for label, offer in row:
        if offer.reasons and offer.reads:
            against.setdefault("; ".join(offer.reasons), []).append(label)
    if not able and not against:
        return "; ".join(dict.fromkeys(reason for _, offer in row for reason in offer.reasons))
    needs = dict.fromkeys(need for _, offer in row if offer.possible for need in offer.needs)
    refusals = [f"not {', '.join(labels)}: {reasons}" for reasons, labels in against.items()]
    parts = (", ".join(able), f"needs {', '.join(needs)}" if needs else "", *refusals)
    return ". ".join(part for part in parts if part)


def _by_part(cells: Sequence[Cell], verdicts: Verdicts) -> None:
    """A section per role and format of the model; its parts differ in shape, so a backend may take some of them."""
    groups: dict[tuple[Role, str], list[Cell]] = {}
    for cell in cells:
        groups.setdefault((cell.part.role, cell.part.problem.weights.name), []).append(cell)
    sections = [Section(_heading(*key, group), list(_lines(group, verdicts))) for key, group in groups.items()]
    titles = ("backend", "kind", "can", "last verdict here", "as, or every reason")
    Table([Column(title) for title in titles], sections).write()


def _heading(role: Role, weights: str, group: Sequence[Cell]) -> str:
    uses = sum(cell.part.uses for cell in group)
    noun = "module" if role is Role.LINEARS else "layer"
    shapes = f" of {len(group)} shapes" if len(group) > 1 else ""
    return f"{role.value} {weights} on {_title(group[0].device)}: {uses} {noun}{'s' if uses != 1 else ''}{shapes}"


def _lines(group: Sequence[Cell], verdicts: Verdicts) -> Iterator[list[str]]:
    columns = zip(*(cell.offers for cell in group), strict=True)
    for row in sorted(columns, key=_rank):
        first = row[0]
        able = sum(offer.possible for offer in row)
        schemes = " ".join(dict.fromkeys(offer.scheme for offer in row if offer.possible))
        reasons = "; ".join(dict.fromkeys(reason for offer in row for reason in offer.reasons))
        needs = ", ".join(dict.fromkeys(need for offer in row if offer.possible for need in offer.needs))
        some = f"for {able} of {len(row)} shapes, else " if 0 < able < len(row) else ""
        seen = [verdicts.get((cell.part.key, first.backend)) for cell in group if first.adapter]
        parts = (schemes, f"needs {needs}" if needs else "", f"{some}{reasons}")
        yield [first.backend, first.kind, _can(row), _worst(seen), "; ".join(part for part in parts if part)]


def _worst(seen: Iterable[Seen | None]) -> str:
    found = sorted((one for one in seen if one is not None), key=lambda one: not one.verdict.failed)
    return str(found[0]) if found else "-"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
