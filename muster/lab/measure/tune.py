"""`muster bench MODEL --tune`: finds tile sizes for this machine, has the winners judged, and only then keeps them."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

import torch

from muster import env
from muster.device import Device
from muster.errors import UnprovenError, UsageError
from muster.lab import units
from muster.lab.ledger.evidence import Verdict
from muster.lab.ledger.ledger import Ledger
from muster.lab.measure import search
from muster.lab.measure.search import Found
from muster.lab.prove import isolate
from muster.lab.prove.cases import Case
from muster.lab.prove.contender import Contender, registry_of
from muster.lab.prove.isolate import Limits
from muster.lab.prove.proof import prove_parts
from muster.lab.prove.selection import Selection
from muster.lab.prove.standing import Standings
from muster.lab.prove.tally import Tally
from muster.lab.screen import screen
from muster.moe.backend import FusedFunc
from muster.moe.kernels import tuning
from muster.moe.kernels.tuning import Table, Tuning
from muster.moe.problem import MoEProblem

LIMITS = Limits(seconds=900.0)
"""Of the process that searches: it tells of nothing while it compiles and times one token count."""


def tune(selection: Selection) -> Path:
    """Searches for every expert part and token count, proves what won, saves it, and answers where.

    Raises:
        UsageError: no backend here takes tile sizes from a table.
        UnprovenError: the search broke, or the judge rejects what it found.
    """
    torch.set_num_threads(env.read().threads)
    home = env.read().home
    with Ledger.open(home) as ledger:
        tuner = _Tuner(selection, ledger, home)
        fresh = [one for contender in tuner.searched() for one in tuner.search(contender)]
        return tuner.keep(fresh)


def remark(device: Device, contenders: Sequence[Contender]) -> str:
    """Says which backends run with sizes that nobody measured here, and for which formats; empty when none does."""
    names: dict[str, None] = {}
    formats: dict[str, None] = {}
    for one in contenders:
        if one.refusal is None and _kernels(one) and not _tuned(one, device):
            names[one.backend] = None
            formats[one.part.problem.weights.name] = None
    if not names or not device.present or device.key == "cpu":
        return ""
    *others, last = names
    who, verb = (f"{', '.join(others)} and {last}", "run") if others else (last, "runs")
    return (
        f"{device.name} is untuned for {', '.join(formats)} experts: {who} {verb} with default tile "
        "sizes; muster bench MODEL --tune finds its own"
    )


def _kernels(contender: Contender) -> str:
    """Whose tile sizes it takes; empty: nobody's."""
    if not isinstance(contender.part.problem, MoEProblem) or contender.refusal is not None:
        return ""
    return str(registry_of(contender.part.role).get(contender.backend).facts.tiles)


def _tuned(contender: Contender, device: Device) -> bool:
    known = tuning.tunings(device.name, env.read().home)
    problem, kernels = contender.part.problem, _kernels(contender)
    return isinstance(problem, MoEProblem) and any(one.fits(kernels, problem) for one in known)


@dataclass(frozen=True)
class _Tuner:
    """One run of the search.

    Attributes:
        selection: parts, token counts and backends.
        ledger: where the verdicts on what was found go.
        home: MUSTER_HOME.
        record: what its tunings say of where they come from.
    """

    selection: Selection
    ledger: Ledger
    home: Path
    record: str = field(
        default_factory=lambda: (
            f"muster bench --tune, {datetime.now(UTC):%Y-%m-%d}, torch {torch.__version__}, triton {version('triton')}"
        )
    )

    def searched(self) -> tuple[Contender, ...]:
        """The first fused function of each part and kernels: whoever else runs those takes what it finds.

        Raises:
            UsageError: there is none.
        """
        able: dict[tuple[str, str], Contender] = {}
        for one in self.selection.contenders():
            if _kernels(one) and isinstance(registry_of(one.part.role).get(one.backend), FusedFunc):
                able.setdefault((one.part.key, _kernels(one)), one)
        if not able:
            expected = "a GPU and experts for a backend whose tile sizes can be chosen, such as triton_fused"
            raise UsageError("--tune", found=f"none on {self.selection.device.name}", expected=expected)
        return tuple(able.values())

    def search(self, contender: Contender) -> Iterator[Tuning]:
        """The best sizes for each token count of a part.

        Raises:
            UnprovenError: the process ended before it was done.
        """
        counts = [count for count in self.selection.tokens if contender.meant_for(count)]
        cases = [Case(contender.part, count, "uniform", 0, str(self.selection.directory)) for count in counts]
        found = list[Found]()

        def tell(path: Path, _: float) -> None:
            found.append(Found.read(path))
            _say(f"{contender.part.key}, {contender.backend}, T={counts[len(found) - 1]}: {_told(found[-1])}")

        payload = search.order(contender.backend, cases, self.selection.device)
        with isolate.run("muster.lab.measure.search:search_in_child", payload, LIMITS, on_result=tell) as outcome:
            if len(found) < len(cases):
                thing = f"{contender.backend} at {counts[len(found)]} tokens of {contender.part.key}"
                raise UnprovenError(thing, found=outcome.describe(), expected="times of its tile sizes")
        problem = contender.part.problem
        assert isinstance(problem, MoEProblem)
        for count, one in zip(counts, found, strict=True):
            yield Tuning(
                kernels=_kernels(contender),
                weights=problem.weights.name,
                shape=tuning.shape_of(problem),
                up_to=None if count == counts[-1] else count * problem.routing.top_k / problem.local_experts,
                tiles=one.tiles,
                microseconds=round(one.sample.median * 1e6, 2),
                at=f"{contender.part.key}, {count} tokens",
                record=self.record,
            )

    def keep(self, fresh: Sequence[Tuning]) -> Path:
        """Saves the tunings, once every backend that will run with them is proven to be right with them.

        Raises:
            UnprovenError: one is not.
        """
        path = tuning.own_path(self.home, self.selection.device.name)
        known = Table.read(path) if path.exists() else Table(self.selection.device.name, self.selection.device.key, ())
        table = known.with_(fresh)
        with tempfile.TemporaryDirectory(prefix="muster-tuning-") as staging:
            table.write(tuning.own_path(Path(staging), self.selection.device.name))
            self._prove(Path(staging))
        table.write(path)
        _say(f"{len(fresh)} tunings saved in {path}")
        return path

    def _prove(self, staging: Path) -> None:
        """Has the judge look at what runs with the tables of `staging`; its verdicts go into the ledger as any."""
        affected = tuple(one for one in self.selection.contenders() if _kernels(one))
        agenda = self.selection.agenda(quick=True)
        standings = Standings(self.ledger, self.selection.device, staging)
        environment = {**os.environ, "MUSTER_HOME": str(staging)}
        with screen() as view:
            prove_parts(
                affected,
                agenda,
                self.ledger,
                standings,
                self.selection.directory,
                report=Tally(view),
                environment=environment,
            )
        wrong = [
            UnprovenError(f"{one.contender.backend} at {units.tokens(one.tokens)}", found=one.why, expected="proven")
            for each in affected
            for one in standings.of(each, agenda[each.part])
            if one.asked and one.verdict is not Verdict.PROVEN
        ]
        error = UnprovenError.gather("not saved: what won is not right", wrong, hint="the sizes stay as they were")
        if error is not None:
            raise error


def _told(found: Found) -> str:
    tiles = found.tiles
    sizes = ", ".join(
        f"{name} {tile.columns}x{2 * tile.half}, {tile.warps} warps, {tile.stages} stages"
        for name, tile in (("gate_up", tiles.first), ("down", tiles.second))
    )
    gain = found.default.median / found.sample.median
    failed = f", {len(found.failed)} could not be launched" if found.failed else ""
    return (
        f"{units.time(found.sample.median)} with {tiles.rows} rows, {sizes}; {gain:.2f}x as fast as before, "
        f"best of {found.tried}{failed}"
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
