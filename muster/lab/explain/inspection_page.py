"""An inspection for a reader: the answer first, then what is stored, kept, legal, fitting, possible."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from muster.checkpoint.inventory import Group, Inventory
from muster.checkpoint.kinds import Kind
from muster.checkpoint.spec import GatedDelta
from muster.lab import units
from muster.lab.explain.cache import Kept, Memory, SequenceMemory
from muster.lab.explain.fitting import Fit
from muster.lab.explain.gpus import GPUS
from muster.lab.explain.inspection import Inspection, routing_words
from muster.lab.explain.machine import COUNTS, Machine
from muster.lab.explain.split import Hindrance, Split
from muster.lab.prose import lines, wrapped
from muster.lab.table import Column, Section, Table

if TYPE_CHECKING:
    from muster.lab.explain.offers import Offer

_NOTEWORTHY = 0.005
"""Share of a token's bytes below which a format is not mentioned."""


def page(inspection: Inspection, budget: float | None) -> Iterator[str]:
    """The lines, each when it is known; `budget`: bytes of a GPU that is only known by its memory."""
    yield from _summary(inspection)
    yield ""
    yield from _stored(inspection)
    yield ""
    yield from _kept(inspection)
    yield ""
    yield from _splits(inspection)
    if budget is not None:
        yield ""
        yield from _budget(inspection, budget)
    elif inspection.machines:
        for machine in inspection.machines:
            yield ""
            yield from _machine(inspection, machine)
    else:
        yield ""
        yield from _fits(inspection)
        yield ""
        yield from _backends_by_capability(inspection)
    yield from _remarks("The config disagrees with the files, which win", inspection.inventory.disagreements)
    yield from _remarks("Notes", inspection.inventory.notes)


def _remarks(title: str, remarks: Sequence[str]) -> Iterator[str]:
    if remarks:
        yield ""
        yield title
        for remark in remarks:
            yield from wrapped(remark)


def _summary(inspection: Inspection) -> Iterator[str]:
    inventory, moe, spec = inspection.inventory, inspection.experts, inspection.inventory.spec
    yield f"{inventory.name}: {spec.family} ({spec.architecture}), {len(spec.layers)} layers"
    total, active = units.number(inspection.parameters), units.number(inspection.active)
    yield f"  {total} parameters, {active} active per token; {_sizes(inventory)}"
    reads = sum(inspection.token_bytes.values())
    much = {stored: nbytes for stored, nbytes in inspection.token_bytes.items() if nbytes > _NOTEWORTHY * reads}
    shares = ", ".join(f"{units.percent(nbytes, reads)} of it {stored.upper()}" for stored, nbytes in much.items())
    yield from wrapped(f"a token reads {units.size(reads)} of weights: {shares}")
    if moe is not None:
        formats = dict.fromkeys(f"{g.stored.upper()} {g.scheme}" for g in inspection.groups if _routed(g))
        yield f"  experts: {moe.experts} of width {moe.inner:,}, {' and '.join(formats)}, {_activation(inspection)}"
        yield f"  routing: {routing_words(moe.routing)}"
        shared = moe.shared
        gated = " behind a sigmoid gate" if shared is not None and shared.gated else ""
        yield "  shared expert: " + (f"width {shared.inner:,}{gated}" if shared is not None else "none")
    yield from wrapped(f"MTP: {inspection.drafting.text()}")
    yield from _shared_tables(inspection)


def _routed(group: Group) -> bool:
    return group.kind is Kind.ROUTED and not group.draft and bool(group.scheme)


def _sizes(inventory: Inventory) -> str:
    return f"{units.size(inventory.nbytes)} in {units.exact(inventory.tensors)} tensors"


def _activation(inspection: Inspection) -> str:
    moe = inspection.experts
    assert moe is not None
    return moe.activation + (f" clamped at {moe.limit:g}" if moe.limit is not None else "")


def _shared_tables(inspection: Inspection) -> Iterator[str]:
    drafting = inspection.drafting
    if not drafting.layers:
        return
    size = f"{units.number(drafting.parameters)} parameters, {units.size(drafting.nbytes)}"
    if drafting.copies:
        yield f"       {size}, of which {units.size(drafting.copies)} repeat the embedding and head: not loaded"
    else:
        yield f"       {size}; it shares the model's embedding and output head"


def _stored(inspection: Inspection) -> Iterator[str]:
    columns = (
        Column("part"),
        Column("stored as"),
        Column("scheme"),
        Column("parameters", True),
        Column("bytes", True),
        Column("tensors", True),
    )
    rows = [
        (
            ("MTP " if group.draft else "") + group.kind.value,
            group.stored.upper(),
            group.scheme,
            units.number(group.parameters),
            units.size(group.nbytes),
            units.exact(group.tensors),
        )
        for group in inspection.groups
    ]
    yield from lines(Table(columns, (Section("Stored", rows),)))


def _kept(inspection: Inspection) -> Iterator[str]:
    inventory = inspection.inventory
    yield "A sequence keeps"
    narrow = SequenceMemory.of(inventory.spec, "fp8").by_memory()
    for kind, layers in inspection.memories.items():
        yield f"  {kind.value}: {_amount(inventory, kind, layers, narrow[kind])}, in {_layers(layers)}"
    if inventory.draft_layers:
        draft = SequenceMemory.of_draft(inventory.spec)
        yield f"  each MTP layer: {units.exact(int(draft.token_bytes()))} B per token more"
    quant = inventory.spec.quant
    if quant is not None and quant.kv_cache:
        yield f"  the checkpoint declares a cache in {quant.kv_cache.upper()}; an engine may keep BF16"


def _layers(layers: Sequence[Kept]) -> str:
    return f"{len(layers)} layer{'s' if len(layers) > 1 else ''}"


def _amount(inventory: Inventory, kind: Memory, layers: Sequence[Kept], narrow: Sequence[Kept]) -> str:
    if kind is Memory.STATE:
        attention = (layer.attention for layer in inventory.spec.layers)
        dtypes = {one.state_dtype for one in attention if isinstance(one, GatedDelta)}
        return f"{units.size(sum(kept.fixed for kept in layers))} in all, {' and '.join(sorted(dtypes)).upper()}"
    token = sum(kept.token for kept in layers)
    if kind is Memory.INDEXER:
        return f"{units.exact(token)} B per token, FP8"
    both = f"{units.exact(token)} B per token, {units.exact(sum(kept.token for kept in narrow))} in FP8"
    window, chosen = layers[0].window, layers[0].chosen
    if window is not None:
        full = units.size(sum(kept.held(window) for kept in layers))
        return f"{both}, for the last {window} tokens: {full} at most"
    return both if chosen is None else f"{both}, of which a step reads {chosen:,} tokens"


def _splits(inspection: Inspection) -> Iterator[str]:
    yield "Splits over GPUs"
    plain: list[Split] = []
    rows: list[str] = []
    for split, found, near in inspection.splits():
        if not found:
            plain.append(split)
            continue
        verdict = "no" if near or not all(one.harmless for one in found) else "legal"
        rows.append(f"{split}: {verdict}: {'; '.join(map(_hindrance, found))}" + _near(near))
    if plain:
        yield from wrapped(f"legal as they are: {'; '.join(map(str, plain))}")
    for row in rows:
        yield from wrapped(row)


def _hindrance(one: Hindrance) -> str:
    price = f" (+{units.size(one.price)} in all)" if one.price else ""
    return one.reason + (f", {one.remedy}{price}" if one.remedy else "")


def _near(near: Sequence[Split]) -> str:
    return f"; or {' or '.join(map(str, near))}" if near else ""


def _budget(inspection: Inspection, budget: float) -> Iterator[str]:
    split = inspection.split or Split()
    need = inspection.demand(split)
    answer = "fits" if need.fits(budget) else "does not fit"
    yield f"On {split.gpus} GPU{'s' if split.gpus > 1 else ''} of {units.size(budget)} to fill ({split}): {answer}"
    yield from _breakdown(inspection, split, budget)


def _machine(inspection: Inspection, machine: Machine) -> Iterator[str]:
    fit = inspection.fit(machine)
    answer = "fits" if fit.fits else "does not fit"
    yield f"On {machine} ({machine.split}): {answer}"
    yield from _breakdown(inspection, machine.split, machine.gpu.budget)
    if machine.gpu.unified:
        reserved = units.size(machine.gpu.reserved)
        yield from wrapped(
            f"its memory is also the CPU's: {reserved} are left to the system; while weights are loaded, the file "
            "cache needs room too"
        )
    yield f"  at most {_speed(inspection, fit)}: {_limiting(fit)}"
    yield from _prospects(inspection, machine)


def _breakdown(inspection: Inspection, split: Split, budget: float) -> Iterator[str]:
    need, load = inspection.demand(split), inspection.load
    mtp = f" + MTP {units.size(need.draft)}" if need.draft else ""
    many = f"{load.sequences} sequence{'s' if load.sequences > 1 else ''} of {load.context:,} tokens"
    yield from wrapped(
        f"per GPU: weights {units.size(need.weights)}{mtp} + cache {units.size(need.cache)} ({many}) + workspace "
        f"{units.size(need.workspace)} = {units.size(need.total)} of {units.size(budget)}"
    )
    if not need.fits(budget):
        yield f"  {units.size(need.total - budget)} too much on each GPU"
        return
    tokens = need.tokens(budget)
    yield (
        f"  room for {units.number(tokens)} tokens of context in all"
        if tokens is not None
        else "  room for any context"
    )


def _speed(inspection: Inspection, fit: Fit) -> str:
    load = inspection.load
    batch = "one sequence" if load.sequences == 1 else f"{load.sequences} sequences"
    return f"{load.sequences / fit.limit.seconds:,.0f} tok/s for {batch} at {load.context:,} tokens"


def _limiting(fit: Fit) -> str:
    largest = fit.limit.largest
    return f"{units.percent(largest.seconds, fit.limit.seconds)} of a step is {largest.component} ({largest.bound})"


def _fits(inspection: Inspection) -> Iterator[str]:
    columns = (
        Column("GPU"),
        Column("each", True),
        *(Column(f"on {count}", True) for count in COUNTS),
        Column("most of a step is"),
    )
    rows = []
    for gpu, several in inspection.fits():
        last = next((fit for fit in reversed(several) if fit is not None and fit.fits), None)
        reason = "" if last is None else f"{last.limit.largest.component} ({last.limit.largest.bound})"
        cells = (_cell(inspection, fit) for fit in several)
        rows.append((gpu.name, units.size(gpu.budget), *cells, reason))
    batch, context = inspection.load.sequences, inspection.load.context
    title = f"Fits: tokens of context beside the weights, and the limit in tok/s (batch {batch}, {context:,} tokens)"
    yield from lines(Table(columns, (Section(title, rows),)))


def _cell(inspection: Inspection, fit: Fit | None) -> str:
    if fit is None:
        return "no split"
    if not fit.fits:
        return "-"
    room = "any" if fit.tokens is None else units.number(fit.tokens)
    return f"{room}, {inspection.load.sequences / fit.limit.seconds:,.0f}/s"


def _backends_by_capability(inspection: Inspection) -> Iterator[str]:
    """Which backends could run, for each compute capability in the table of GPUs."""
    yield "Backends that could compute its experts, by compute capability (* known, no adapter yet)"
    from muster.lab.explain.prospects import prospects

    parts: dict[str, dict[str, list[str]]] = {}
    for device, gpu in {gpu.device: gpu for gpu in GPUS}.items():
        for prospect in prospects(inspection.inventory, gpu, inspection.split or Split()):
            names = ", ".join(map(_name, prospect.possible)) or "none"
            parts.setdefault(prospect.title, {}).setdefault(names, []).append(device)
    for title, answers in parts.items():
        yield f"  {title}"
        for names, devices in answers.items():
            yield from wrapped(f"{', '.join(devices)}: {names}", indent=4)


def _prospects(inspection: Inspection, machine: Machine) -> Iterator[str]:
    from muster.lab.explain.prospects import prospects

    for prospect in prospects(inspection.inventory, machine.gpu, machine.split, here=machine.here):
        names = ", ".join(_name(offer) for offer in prospect.possible) or "none"
        yield from wrapped(f"could compute {prospect.title}: {names} (* known, no adapter yet)")
        yield "  could not:"
        for offer in prospect.refused:
            yield from wrapped(f"{offer.backend}: {'; '.join(offer.reasons)}", indent=4)


def _name(offer: Offer) -> str:
    return f"{offer.backend}{'' if offer.adapter else '*'} {offer.scheme}"
