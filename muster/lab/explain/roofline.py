"""`muster roofline`: how fast a model could be on a machine, where the time goes, and what would change it."""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from muster.checkpoint.inventory import Inventory
from muster.errors import UsageError
from muster.lab import units
from muster.lab.explain.changes import Change, changes
from muster.lab.explain.limit import Limit, limit, usable_rate
from muster.lab.explain.machine import Machine, machines
from muster.lab.explain.speculation import Speculation, speculation
from muster.lab.explain.split import hindrances, nearest, share
from muster.lab.explain.traffic import Component, Step, decoder_modules
from muster.lab.explain.workload import Workload
from muster.lab.prose import lines, wrapped
from muster.lab.table import Column, Section, Table

_BATCHES = tuple(1 << power for power in range(9))
_TYPICAL_ACCEPTANCES = (0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True, eq=False)
class Roofline:
    """A model on a machine."""

    inventory: Inventory
    machine: Machine
    workload: Workload

    @cached_property
    def decode(self) -> Limit:
        """A decode step."""
        return self._limit(self.workload.decode)

    @cached_property
    def prefill(self) -> Limit | None:
        """The prefill of one sequence; None for an empty context."""
        return self._limit(self.workload.prefill) if self.workload.context else None

    @cached_property
    def even(self) -> float:
        """Seconds of a decode step if every byte and operation were cut evenly and nothing sent."""
        whole = replace(self.machine.split, tensor=1, expert=1)
        return limit(self.inventory, whole, self.workload.decode, self.machine.gpu).seconds / self.machine.split.gpus

    @cached_property
    def changes(self) -> tuple[Change, ...]:
        """What other formats would save in decode."""
        return changes(self.inventory, self.machine.split, self.workload.decode, self.machine.gpu)

    @cached_property
    def speculation(self) -> tuple[Speculation, ...]:
        """Drafting one token, two, and so on; empty without a draft layer."""
        if not self.inventory.draft_layers:
            return ()
        numbers = range(1, (self.workload.drafts or 3) + 1)
        step, machine = self.workload.decode, self.machine
        return tuple(speculation(self.inventory, machine.split, step, machine.gpu, number) for number in numbers)

    def at(self, batch: int) -> Roofline:
        """The same with another number of sequences."""
        return replace(self, workload=replace(self.workload, batch=batch))

    def _limit(self, step: Step) -> Limit:
        return limit(self.inventory, self.machine.split, step, self.machine.gpu)

    def document(self) -> dict[str, Any]:
        """Everything, for `--json`; bytes and operations are those of the fullest GPU, times in seconds."""
        gpu, split, work = self.machine.gpu, self.machine.split, self.workload
        return {
            "gpu": gpu.name,
            "gpus": split.gpus,
            "tensor_parallel": split.tensor,
            "expert_parallel": split.expert,
            "bandwidth": gpu.bandwidth,
            "bandwidth_measured": self.machine.measured,
            "batch": work.batch,
            "context": work.context,
            "cache": work.cache,
            "decode": _limit_document(self.decode, work.batch),
            "decode_cut_evenly": self.even,
            "prefill": None if self.prefill is None else _limit_document(self.prefill, work.context),
            "changes": [vars(change) for change in self.changes],
            "speculation": [self._speculation_document(one) for one in self.speculation],
            "hindrances": [hindrance._asdict() for hindrance in hindrances(self.inventory, split)],
            "assumptions": list(self.assumptions()),
        }

    def _speculation_document(self, one: Speculation) -> dict[str, Any]:
        known = self.workload.acceptance
        return {
            "drafts": one.drafts,
            "draft_seconds": one.draft,
            "verify_seconds": one.verify,
            "break_even_acceptance": one.break_even,
            "acceptance": known,
            "tokens_per_step": None if known is None else one.tokens(known),
            "speedup": None if known is None else one.speedup(known),
        }

    def text(self) -> Iterator[str]:
        """The same for a reader, the answer first."""
        decode, work = self.decode, self.workload
        yield f"{self.inventory.name} on {self._place()}"
        yield ""
        yield f"  {_rate(decode, work.batch)} at most, {_load(work)}"
        yield f"  {units.percent(decode.largest.seconds, decode.seconds)} of a step is {_reason(decode)}"
        if self.machine.split.gpus > 1:
            even = f"{units.time(self.even)}, {work.batch / self.even:,.0f} tok/s, if every weight were cut evenly"
            yield f"  {units.time(decode.local)} without collectives; {even}"
            yield from self._copied()
        yield from self._illegal()
        yield ""
        yield from _table("Decode step, per GPU", decode)
        if self.prefill is not None:
            yield ""
            title = f"Prefill of {units.exact(work.context)} tokens, per GPU: {_rate(self.prefill, work.context)}"
            yield from _table(title, self.prefill)
        yield from self._change_text()
        yield from self._speculation_text()
        yield ""
        yield "Assumptions"
        for line in self.assumptions():
            yield from wrapped(line)

    def _place(self) -> str:
        split = self.machine.split
        return f"{self.machine}" + (f" ({split})" if split.gpus > 1 else "")

    def _illegal(self) -> Iterator[str]:
        found = [one for one in hindrances(self.inventory, self.machine.split) if not one.harmless]
        for one in found:
            remedy = f"; {one.remedy} (+{units.size(one.price)})" if one.remedy else ""
            yield f"  this split is not legal: {one.reason}{remedy}"
        if found:
            yield f"  legal and near: {'; '.join(map(str, nearest(self.inventory, self.machine.split)))}"

    def _copied(self) -> Iterator[str]:
        split, spec = self.machine.split, self.inventory.spec
        copied = [module for module in decoder_modules(self.inventory) if share(module, spec, split) == 1]
        kinds = ", ".join(dict.fromkeys(module.kind.value for module in copied))
        if copied:
            size = units.size(sum(module.nbytes for module in copied))
            yield from wrapped(f"{size} of weights are copied to every GPU whole: of {kinds}")

    def _change_text(self) -> Iterator[str]:
        if not self.changes:
            return
        yield ""
        columns = (Column("change"), Column("saves", True), Column("share", True), Column("less per GPU", True))
        rows = [
            (
                change.name,
                units.time(change.saved),
                units.percent(change.saved, self.decode.seconds),
                units.size(change.memory) if change.memory else "",
            )
            for change in self.changes
        ]
        yield from lines(Table(columns, (Section("What a change would save of a decode step", rows),)))

    def _speculation_text(self) -> Iterator[str]:
        yield ""
        if not self.speculation:
            declared = self.inventory.spec.draft_layers
            missing = f"the config declares {declared}, none is stored" if declared else "none"
            yield f"Drafting: no draft (MTP) layers: {missing}"
            return
        known = self.workload.acceptance
        shown = (known,) if known is not None else _TYPICAL_ACCEPTANCES
        titles = ("drafts", "draft", "verify", "pays from", *(f"at {100 * accepted:.0f} %" for accepted in shown))
        rows = [
            (
                str(one.drafts),
                units.time(one.drafts * one.draft),
                units.time(one.verify),
                "never" if one.break_even is None else f"{100 * one.break_even:.0f} %",
                *(f"{one.speedup(accepted):.2f}x" for accepted in shown),
            )
            for one in self.speculation
        ]
        title = "Drafting with the MTP layer: acceptance from which it pays, and speed by acceptance"
        yield from lines(Table([Column(title, True) for title in titles], (Section(title, rows),)))

    def assumptions(self) -> Iterator[str]:
        """What the figures rest on."""
        gpu = self.machine.gpu
        how = "measured" if self.machine.measured else "published"
        source = gpu.sources.get("measured_bandwidth" if self.machine.measured else "bandwidth", "")
        yield f"{gpu.name} reads {gpu.bandwidth / 1e12:.4g} TB/s, {how}" + (f" ({source})" if source else "")
        if not self.machine.measured and gpu.measured_bandwidth is not None:
            yield f"{gpu.measured_bandwidth / 1e12:.4g} TB/s were measured: --measured divides by that"
        if gpu.rates:
            rates = ", ".join(f"{name.upper()} {units.number(rate)}" for name, rate in gpu.rates.items())
            yield f"operations per second, dense: {rates}" + _source(gpu.sources, "rates")
        kinds = {kind for line in self.decode.lines for kind in line.work.operations}
        for kind in sorted(kinds):
            usable, _ = usable_rate(kind, gpu)
            if usable and usable != kind:
                yield f"{kind.upper()} products run at the {usable.upper()} rate: this GPU has no {kind.upper()} cores"
        if self.machine.split.gpus > 1:
            link = gpu.link
            cost = f"{units.time(link.start)} to start and {units.time(link.step)} per hop"
            yield f"collectives over {link.name}: {units.size(link.bandwidth)}/s each way, {cost} ({link.source})"
        yield "tokens pick experts at random and evenly: E (1 - (1 - k/E)^T) of them; real routing touches fewer"
        yield "components run one after the other; weights are read once a step, activations stay on the chip"
        yield f"cache in {self.workload.cache.upper()}" + self._declared_cache()
        if self.speculation:
            yield "acceptance: of each draft, given those before it; rejected tokens cost no states"

    def _declared_cache(self) -> str:
        quant = self.inventory.spec.quant
        declared = quant.kv_cache if quant is not None else None
        return f"; the checkpoint declares {declared.upper()}" if declared else ""


def _source(sources: Mapping[str, str], figure: str) -> str:
    return f" ({sources[figure]})" if figure in sources else ""


def _rate(found: Limit, tokens: int) -> str:
    return f"{units.time(found.seconds)}, {tokens / found.seconds:,.0f} tok/s"


def _load(work: Workload) -> str:
    each = f"{units.exact(work.context)} tokens of context"
    return f"for one sequence of {each}" if work.batch == 1 else f"for {work.batch} sequences of {each}"


def _reason(found: Limit) -> str:
    line = found.largest
    if line.component is Component.LINKS:
        return "GPUs talking to each other"
    verb = "reading" if line.bound == "memory" else "computing"
    noun = "weights of the " if line.bound == "memory" and not line.work.cache_bytes else "the "
    return f"{verb} {noun}{line.component}"


def _table(title: str, found: Limit) -> Iterator[str]:
    columns = (
        Column("component"),
        Column("bytes", True),
        Column("operations", True),
        Column("least time", True),
        Column("share", True),
        Column("waits for"),
    )
    rows = [
        (
            line.component.value,
            units.size(line.work.bytes) if line.work.bytes else "",
            units.number(sum(line.work.operations.values())) if line.work.operations else "",
            units.time(line.seconds),
            units.percent(line.seconds, found.seconds),
            line.bound.value,
        )
        for line in found.lines
    ]
    total = ("all", units.size(found.bytes), units.number(found.operations), units.time(found.seconds), "", "")
    yield from lines(Table(columns, (Section(title, [*rows, total]),)))


def _limit_document(found: Limit, tokens: int) -> dict[str, Any]:
    return {
        "seconds": found.seconds,
        "seconds_without_collectives": found.local,
        "tokens_per_second": tokens / found.seconds,
        "bytes": found.bytes,
        "operations": found.operations,
        "components": [
            {
                "component": line.component.value,
                "weight_bytes": line.work.weight_bytes,
                "cache_bytes": line.work.cache_bytes,
                "operations": dict(line.work.operations),
                "messages": [message._asdict() for message in line.work.messages],
                "seconds": line.seconds,
                "bound": line.bound.value,
            }
            for line in found.lines
        ],
    }


def command(
    model: str,
    *,
    gpu: str,
    tensor: int | None,
    expert: int | None,
    load: Workload,
    measured: bool,
    json: bool,
    plot: Path | None,
) -> None:
    """Prints the rooflines of a model on one machine or several."""
    if plot is not None:
        from muster.lab.plot import check_can_save

        check_can_save(plot)
    inventory = Inventory.of(model)
    if load.drafts is not None and not inventory.draft_layers:
        declared = inventory.spec.draft_layers
        found = f"{model}, which stores no draft layer" + (
            f" though its config declares {declared}" if declared else ""
        )
        raise UsageError("--mtp", found=found, expected="a checkpoint with MTP layers")
    places = machines(gpu, tensor=tensor, expert=expert, measured=measured)
    rooflines = [Roofline(inventory, place, load) for place in places]
    if plot is not None:
        _plot(rooflines, plot)
    if json:
        document = {"model": inventory.name, "source": inventory.source, "machines": [r.document() for r in rooflines]}
        sys.stdout.write(jsonlib.dumps(document) + "\n")
        return
    sys.stdout.write("\n\n".join("\n".join(roofline.text()) for roofline in rooflines) + "\n")


def _plot(rooflines: Sequence[Roofline], file: Path) -> None:
    """Speed over the batch for all machines, and for each one where a step's time goes."""
    from muster.lab.plot import Chart, Curve, Panel

    batches = {roofline: {batch: roofline.at(batch).decode for batch in _BATCHES} for roofline in rooflines}
    speeds = [
        Curve(str(roofline.machine), {batch: batch / found.seconds for batch, found in steps.items()})
        for roofline, steps in batches.items()
    ]
    context = rooflines[0].workload.context
    panels = [Panel("limit of decode", "tokens per second", speeds, x="sequences")]
    for roofline, steps in batches.items():
        components = dict.fromkeys(line.component for found in steps.values() for line in found.lines)
        curves = [
            Curve(component.value, {batch: found.of_component(component) for batch, found in steps.items()})
            for component in components
        ]
        panels.append(Panel(f"least time of a step on {roofline._place()}", "time", curves, x="sequences"))
    rows = [panels[at : at + 2] for at in range(0, len(panels), 2)]
    note = f"{context:,} tokens of context each; bandwidth and rates as published unless the machine is this one"
    Chart(f"{rooflines[0].inventory.name}: what the hardware allows", rows, note).save(file)
