"""`muster backends`: every backend on every part of a model, or on every format: can it, and if not every reason."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from muster.contract import NO_ADAPTER, Known
from muster.device import COMPUTE_CAPABILITIES, Device, elsewhere, here
from muster.errors import UsageError
from muster.lab.explain import backend_page, backend_tables
from muster.lab.explain.cells import Cell, cells
from muster.lab.explain.offers import Offer, known
from muster.lab.explain.seen import Verdicts, verdicts
from muster.lab.measure.tune import remark
from muster.lab.prove.contender import contenders
from muster.lab.prove.parts import Role
from muster.moe.known import DISPATCHERS


def command(model: str | None, *, cc: str | None, role: str | None, json: bool, markdown: bool = False) -> None:
    """The command.

    Raises:
        UsageError: options that cannot be used.
        MusterError: a model that cannot be read.
        SystemExit: 1 when some part of the model has no backend that can be run there.
    """
    roles = _roles(role)
    found = cells(model, _devices(cc), roles)
    if markdown:
        sys.stdout.write(backend_page.page(found))
    else:
        seen = verdicts(found) if model is not None else {}
        if json:
            sys.stdout.write(jsonlib.dumps(_document(model, found, seen)) + "\n")
        else:
            backend_tables.write(found, seen, named=model is not None)
            for text in _remarks(found):
                sys.stdout.write(f"\n{text}\n")
    if model is not None and not all(cell.runs for cell in found):
        raise SystemExit(1)


def _roles(role: str | None) -> tuple[Role, ...]:
    if role is None:
        return tuple(Role)
    if role not in set(Role):
        raise UsageError("--role", found=repr(role), expected=f"one of {', '.join(Role)}")
    return (Role(role),)


def _devices(cc: str | None) -> tuple[Device, ...]:
    if cc is None:
        return (here(),)
    words = COMPUTE_CAPABILITIES if cc == "all" else dict.fromkeys(word.strip() for word in cc.split(","))
    return tuple(elsewhere(word) for word in words)


def _remarks(found: Sequence[Cell]) -> Iterator[str]:
    """What makes a backend slower here than it could be."""
    for device in dict.fromkeys(cell.device for cell in found):
        able = [one for cell in found if cell.device == device for one in contenders(cell.part, device)]
        if untuned := remark(device, able):
            yield untuned


def _document(model: str | None, found: Sequence[Cell], seen: Verdicts) -> Mapping[str, Any]:
    # Draft experts are computed by the backends of experts.
    firsts = {cell.part.role is Role.LINEARS: cell for cell in reversed(found)}
    return {
        "model": model,
        "devices": list(dict.fromkeys(cell.device.key for cell in found)),
        "backends": [entry for cell in firsts.values() for entry in _backends(cell)],
        "dispatchers": [_known(entry) for entry in DISPATCHERS],
        "cells": [_cell(cell, seen) for cell in found],
        "remarks": list(_remarks(found)),
    }


def _backends(cell: Cell) -> Iterator[Mapping[str, Any]]:
    computes: dict[str, Any] = {"computes": "linears" if cell.part.role is Role.LINEARS else "experts"}
    for offer in cell.offers:
        if offer.adapter:
            yield computes | {"name": offer.backend, "kind": offer.kind, "adapter": True, "packages": offer.needs}
    for entry in known(cell.part.role):
        yield {**computes, **_known(entry)}


def _known(entry: Known[Any]) -> Mapping[str, Any]:
    packages = dict.fromkeys(package for path in entry.paths for package in path.packages)
    return {
        "name": entry.name,
        "kind": entry.kind,
        "adapter": False,
        "library": entry.library,
        "packages": [package.name + package.versions for package in packages],
        "needs": entry.needs,
        "dispatchers": entry.dispatchers,
        "draft_ban": entry.draft_ban,
        "traps": [asdict(trap) for trap in entry.traps],
    }


def _cell(cell: Cell, seen: Verdicts) -> Mapping[str, Any]:
    def answer(offer: Offer) -> Mapping[str, Any]:
        last = seen.get((cell.part.key, offer.backend)) if offer.adapter else None
        return {
            "backend": offer.backend,
            "kind": offer.kind,
            "adapter": offer.adapter,
            "runs": offer.runs,
            "scheme": offer.scheme,
            "needs": offer.needs,
            "reasons": [*offer.reasons, *(() if offer.adapter else (NO_ADAPTER,))],
            "verdict": None if last is None else asdict(last),
        }

    return {
        "device": cell.device.key,
        "role": cell.part.role.value,
        "weights": cell.part.problem.weights.name,
        "part": cell.part.key,
        "module": cell.part.module,
        "uses": cell.part.uses,
        "possible": [answer(offer) for offer in cell.possible],
        "refused": [answer(offer) for offer in cell.refused],
    }
