"""The page that `muster backends --cc all --markdown` writes: the matrix with names, and what to beware of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from muster.contract import Known
from muster.lab.explain.backend_tables import PLAIN_LAYER, rows
from muster.lab.explain.cells import Cell
from muster.lab.explain.offers import known
from muster.lab.prove.parts import Role
from muster.moe.known import DISPATCHERS

_INTRODUCTION = f"""# Backends by compute capability

Made by `muster backends --cc all --markdown`; a test holds it to the code. **Bold** names run from here; the others
are known from reading other engines and libraries, and have no adapter yet. What a name claims is a fact that its
adapter must prove; nobody has run it here. W4A16 is the width in bits of weights and inputs as they are multiplied.
For one compute capability, with every reason of every refusal: `muster backends --cc 12.0`.

{PLAIN_LAYER}
"""


def page(cells: Sequence[Cell]) -> str:
    """The page, in Markdown."""
    return "\n".join((_INTRODUCTION, *_tables(cells), *_notes(cells)))


def _tables(cells: Sequence[Cell]) -> Iterator[str]:
    found = rows(cells, named=False)
    for role in dict.fromkeys(role for role, _ in found):
        devices = list(dict.fromkeys(cell.device.key for cell in cells if cell.part.role is role))
        yield f"## {role.value.capitalize()}\n"
        yield f"| weights | {' | '.join(devices)} |"
        yield f"| --- |{' --- |' * len(devices)}"
        for (of, label), row in found.items():
            if of is role:
                yield f"| {label} | {' | '.join(map(_names, row))} |"
        yield ""


def _names(cell: Cell) -> str:
    names = [f"**{offer.backend}** {offer.scheme}" for offer in cell.possible if offer.adapter]
    names += [f"{offer.backend} {offer.scheme}" for offer in cell.possible if not offer.adapter]
    return "<br>".join(names) or "none"


def _notes(cells: Sequence[Cell]) -> Iterator[str]:
    roles = {cell.part.role for cell in cells}
    if roles & {Role.EXPERTS, Role.DRAFT}:
        yield from _beware("expert layers", known(Role.EXPERTS))
        yield from _beware("token dispatchers", DISPATCHERS)
    if Role.LINEARS in roles:
        yield from _beware("linears", known(Role.LINEARS))


def _beware(what: str, entries: Sequence[Known[Any]]) -> Iterator[str]:
    yield f"## What to know of backends for {what}\n"
    for entry in entries:
        yield f"**{entry.name}**, {entry.kind} ({entry.library})."
        needs = [f"Needs {need}." for need in entry.needs]
        bans = [f"Not for draft layers: {entry.draft_ban}."] if entry.draft_ban else []
        traps = [f"{trap.what} ({trap.source})" for trap in entry.traps]
        yield "\n".join(("", *(f"- {line}" for line in (*needs, *bans, *traps)), "")) if needs or bans or traps else ""
