"""The search for tile sizes, in an isolated process: every candidate is timed on an expert layer, beside the others."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from muster import env
from muster.device import Device, cpu, cuda, free_memory, last_level_cache
from muster.lab.measure.clock import Call
from muster.lab.measure.floor import floor
from muster.lab.measure.peaks import Peaks
from muster.lab.measure.timing import Sample, copied, copies, measure, tie
from muster.lab.prove import child
from muster.lab.prove.cases import Case, ExpertInputs, build
from muster.moe.backend import FusedFunc
from muster.moe.kernels.triton_tiles import Tile, Tiles, candidates, crossed
from muster.moe.kernels.tuning import Cuts
from muster.moe.problem import MoEProblem
from muster.moe.registry import backends
from muster.workspace import Workspace

SECONDS = 0.03
"""For each candidate after the first rounds."""


@dataclass(frozen=True)
class Found:
    """What came of a search.

    Attributes:
        tiles: the sizes that won.
        sample: how long a call takes with them.
        default: how long it takes with the sizes that the device's table, or the default, gives now.
        tried: how many candidates were timed.
        failed: those that could not be launched, and why.
    """

    tiles: Tiles
    sample: Sample
    default: Sample
    tried: int
    failed: tuple[str, ...] = ()

    @staticmethod
    def read(path: Path) -> Found:
        """What `search_in_child` wrote."""
        fields = json.loads(path.read_bytes())
        cut = fields["tiles"]
        tiles = Tiles(cut["rows"], cut["group"], Tile(**cut["first"]), Tile(**cut["second"]))
        sample, default = (Sample(**fields[name]) for name in ("sample", "default"))
        return Found(tiles, sample, default, fields["tried"], tuple(fields["failed"]))


def order(backend: str, cases: Sequence[Case], device: Device) -> dict[str, Any]:
    """What `search_in_child` takes: the cases to find sizes for, one after the other."""
    return {"backend": backend, "cases": [case.to_json() for case in cases], "device": device.key}


def search_in_child(payload: Mapping[str, Any], results: Path) -> None:
    """For `isolate.run`: searches for each case of an `order` and writes one file for it, in their order."""
    torch.set_num_threads(env.read().threads)
    device = cpu() if payload["device"] == "cpu" else cuda()
    for number, text in enumerate(payload["cases"]):
        with torch.inference_mode():
            bench = Bench.of(Case.from_json(text), payload["backend"], device.torch_device)
            found = bench.search()
        child.write(results, f"{number:06}.json", json.dumps(asdict(found)).encode())


@dataclass(frozen=True, eq=False)
class Bench:
    """An expert layer, several times over, and tokens for it.

    Attributes:
        func: the backend.
        layers: its layouts of equal weights, so many that none is found in the cache.
        inputs: the tokens.
        workspace: of all.
    """

    func: FusedFunc[Any]
    layers: tuple[Any, ...]
    inputs: ExpertInputs
    workspace: Workspace

    @staticmethod
    def of(case: Case, backend: str, device: torch.device) -> Bench:
        """Builds the case and as many layouts of its weights as memory has room for."""
        problem, func, inputs = case.part.problem, backends().get(backend), build(case, device)
        assert isinstance(problem, MoEProblem)
        assert isinstance(func, FusedFunc)
        assert isinstance(inputs, ExpertInputs)
        touched = floor(problem, case.tokens, inputs.routed, Peaks(1.0, {})).weight_bytes
        first = func.prepare(problem, inputs.weights)
        room = free_memory(device) // 2 // (inputs.weights.nbytes + first.nbytes)
        others = range(1, max(1, min(copies(touched, last_level_cache(device)), room)))
        layers = (first, *(func.prepare(problem, _weights(inputs)) for _ in others))
        return Bench(func, layers, inputs, Workspace(device))

    @property
    def cuts(self) -> Cuts:
        """The sizes that the layers have now."""
        cuts = self.layers[0].cuts
        assert isinstance(cuts, Cuts)
        return cuts

    def search(self) -> Found:
        """Times every candidate, then what is around the best; a tie leaves all as it is."""
        slots = self.inputs.routed.ids_TK.numel()
        now, target = self.cuts.tiles(slots), self.cuts.target
        failed: dict[Tiles, str] = {}
        first = self._timed((now, *candidates(target, self.cuts.each(slots))), failed)
        best = min(first, key=lambda tiles: first[tiles].median)
        second = self._timed((now, *crossed(best, target)), failed)
        best = min(second, key=lambda tiles: second[tiles].median)
        if tie(second[best], second[now]):
            best = now
        told = tuple(f"{tiles}: {why}" for tiles, why in failed.items())
        return Found(best, second[best], second[now], len({*first, *second}), told)

    def _timed(self, wanted: Iterable[Tiles], failed: dict[Tiles, str]) -> Mapping[Tiles, Sample]:
        """The samples of those that can be launched."""
        device, calls = self.inputs.x_TD.device, {}
        for tiles in dict.fromkeys(wanted):
            if tiles in failed:
                continue
            calls[tiles] = self._calls(tiles)
            # Each is compiled, and the workspace as large as any needs it, before a graph is made of one.
            try:
                calls[tiles][0]()
            except Exception as error:
                failed[tiles] = f"{type(error).__name__}: {error}"
                del calls[tiles]
        names = {str(number): tiles for number, tiles in enumerate(calls)}
        given = {name: calls[tiles] for name, tiles in names.items()}
        safe = names if self.func.facts.graph_safe else ()
        samples = measure(given, device=device, graph_safe=safe, seconds=SECONDS)
        return {tiles: samples[name] for name, tiles in names.items()}

    def _calls(self, tiles: Tiles) -> tuple[Call, ...]:
        cuts, inputs = self.cuts.fixed(tiles), self.inputs
        out = torch.empty_like(inputs.x_TD)
        layers = (replace(layer, cuts=cuts) for layer in self.layers)
        return tuple(partial(self.func.run, layer, inputs.x_TD, inputs.routed, out, self.workspace) for layer in layers)


def _weights(inputs: ExpertInputs) -> Any:
    again = copied(inputs)
    assert isinstance(again, ExpertInputs)
    return again.weights
