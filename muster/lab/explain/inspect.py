"""`muster inspect`: what a model is, how it is stored, where it fits and what could run it. No GPU and no weights."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from muster.checkpoint.inventory import Inventory
from muster.errors import CheckpointError, ConfigError, MusterError, UsageError
from muster.lab import units
from muster.lab.explain.fitting import Fit
from muster.lab.explain.inspection import Inspection
from muster.lab.explain.inspection_page import page
from muster.lab.explain.machine import COUNTS, Machine, machines
from muster.lab.explain.memory import CHUNK, Load
from muster.lab.explain.split import Split

if TYPE_CHECKING:
    from muster.lab.explain.prospects import Prospect

_RESERVED = 1 << 30
"""Bytes that the driver keeps of a GPU that is only known by its memory."""


def command(
    model: str,
    *,
    tensor: int | None,
    expert: int | None,
    gpu: str | None,
    memory: float | None,
    load: Load,
    json: bool,
) -> None:
    """Prints an inspection.

    Raises:
        UsageError: options that make no sense, or no such model.
        SystemExit: 1, after a report of everything that is wrong with a model's files.
    """
    if gpu is not None and memory is not None:
        raise UsageError("--memory", found="it and --gpu", expected="one of them")
    if memory is not None and not 0 < memory < 1 << 20:
        raise UsageError("--memory", found=f"{memory:g}", expected="GiB of one GPU, above 0")
    split = None if tensor is None and expert is None else Split(tensor or 1, expert or 1)
    places = machines(gpu, tensor=tensor, expert=expert) if gpu is not None else ()
    try:
        inventory = Inventory.of(model)
    except (CheckpointError, ConfigError) as error:
        _report(model, error, json=json)
        raise SystemExit(1) from None
    inspection = Inspection(inventory, load, places, split)
    budget = None if memory is None else memory * units.GIB - _RESERVED
    if json:
        sys.stdout.write(jsonlib.dumps(_document(inspection, budget)) + "\n")
        return
    for line in page(inspection, budget):
        sys.stdout.write(f"{line}\n")
        # Asking the backends imports torch: all the rest is there before.
        sys.stdout.flush()


def _report(model: str, error: MusterError, *, json: bool) -> None:
    """Everything that is wrong, on stdout: it is the answer."""
    if json:
        reasons = list(_leaves(error))
        sys.stdout.write(jsonlib.dumps({"model": model, "problems": [_problem(one) for one in reasons]}) + "\n")
    else:
        sys.stdout.write(f"{error}\n")


def _leaves(error: MusterError) -> Iterator[MusterError]:
    if not error.reasons:
        yield error
    for reason in error.reasons:
        yield from _leaves(reason)


def _problem(error: MusterError) -> dict[str, str]:
    return {"thing": error.thing, "found": error.found, "expected": error.expected, "hint": error.hint}


def _document(inspection: Inspection, budget: float | None) -> dict[str, Any]:
    document = inspection.document()
    if budget is not None:
        document["memory"] = _memory_document(inspection, inspection.split or Split(), budget)
    elif inspection.machines:
        document["machines"] = [_machine_document(inspection, machine) for machine in inspection.machines]
    else:
        document["fits"] = [
            {"gpu": gpu.name, "gpus": count, **_fit_document(inspection, fit)}
            for gpu, several in inspection.fits()
            for count, fit in zip(COUNTS, several, strict=True)
            if fit is not None
        ]
    return document


def _machine_document(inspection: Inspection, machine: Machine) -> dict[str, Any]:
    from muster.lab.explain.prospects import prospects

    found = prospects(inspection.inventory, machine.gpu, machine.split, here=machine.here)
    return {
        "gpu": machine.gpu.name,
        "gpus": machine.split.gpus,
        "tensor": machine.split.tensor,
        "expert": machine.split.expert,
        **_fit_document(inspection, inspection.fit(machine)),
        "backends": [_prospect_document(prospect) for prospect in found],
    }


def _prospect_document(prospect: Prospect) -> dict[str, Any]:
    return {"part": prospect.part.key, "offers": [vars(offer) for offer in prospect.offers]}


def _fit_document(inspection: Inspection, fit: Fit) -> dict[str, Any]:
    return {
        **_memory_document(inspection, fit.split, fit.gpu.budget),
        "tokens_per_second": inspection.load.sequences / fit.limit.seconds,
        "largest": fit.limit.largest.component.value,
        "bound": fit.limit.largest.bound.value,
    }


def _memory_document(inspection: Inspection, split: Split, budget: float) -> dict[str, Any]:
    need = inspection.demand(split)
    return {
        "fits": need.fits(budget),
        "budget": budget,
        "weights": need.weights,
        "draft": need.draft,
        "cache": need.cache,
        "workspace": need.workspace,
        "tokens": need.tokens(budget),
        "workspace_for_tokens": CHUNK,
    }
