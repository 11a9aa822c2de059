"""What runs in the isolated process of `proving`: one backend computes its cases; nothing here judges.

A case is a few steps, and each begins with an empty file `<case>.<step>`, so that the parent knows where a process died
or went silent. What was computed is in `<case>.<step>.out`, guard bands included, and `<case>.json` (`Notes`) comes
last: a case that has it is complete.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import torch

from muster import device, env
from muster.contract import missing_packages
from muster.device import Device
from muster.lab.prove.candidate import Candidate, tensors
from muster.lab.prove.cases import Case, Inputs, LinearInputs, build, decline
from muster.lab.prove.child import write
from muster.lab.prove.contender import registry_of
from muster.lab.prove.poison import PoisonedOutput, checksum, poison
from muster.moe.backend import Routed
from muster.moe.problem import MoEProblem
from muster.workspace import Workspace


class Step(StrEnum):
    """Where a trial is."""

    ASK = "ask"
    BUILD = "build"
    PREPARE = "prepare"
    FRESH = "fresh"
    WARM = "warm"
    REPLAY = "replay"


RUNS = (Step.FRESH, Step.WARM, Step.REPLAY)
"""The steps with an output: in a new workspace; in the same, poisoned; by graph replay on other inputs."""


@dataclass(frozen=True)
class Notes:
    """What there is to tell of a case beside its outputs.

    Attributes:
        declined: the backend's reasons not to run it.
        missing: they are all about packages.
        deterministic: whether it declares the same bits for the same inputs.
        changed: names of the inputs that are no longer as they were.
    """

    declined: tuple[str, ...] = ()
    missing: bool = False
    deterministic: bool = False
    changed: tuple[str, ...] = ()

    @staticmethod
    def read(path: Path) -> Notes:
        """The notes written there."""
        fields = json.loads(path.read_text())
        return Notes(tuple(fields["declined"]), fields["missing"], fields["deterministic"], tuple(fields["changed"]))


def compute(payload: Mapping[str, Any], results: Path) -> None:
    """Runs the cases of `payload` (see `proving`) one after the other."""
    torch.set_num_threads(env.read().threads)
    here = device.cpu() if payload["device"] == "cpu" else device.cuda()
    trial = Trial(payload["backend"], here, results)
    for number, text in payload["cases"].items():
        notes = trial.run(number, Case.from_json(text))
        write(results, f"{number}.json", json.dumps(asdict(notes)).encode())
        if notes.changed:
            return  # What it has changed may be the weights of the next case.


def answer(payload: Mapping[str, Any], results: Path) -> None:
    """Writes "ok" if the device of `payload` still computes."""
    ones = torch.ones(64, 64, device=torch.device(payload["device"]))
    write(results, "ok" if float((ones @ ones).sum()) == 64**3 else "wrong")


def other_tokens(case: Case, inputs: Inputs) -> Inputs:
    """Other tokens of the same shape over the same weights, routed to other experts: what a graph is replayed on."""
    if isinstance(inputs, LinearInputs):
        return replace(inputs, x_TK=-inputs.x_TK.flip(0))
    assert isinstance(case.part.problem, MoEProblem)
    experts, ids_TK = case.part.problem.experts, inputs.routed.ids_TK.flip(0)
    ids_TK = torch.where((ids_TK >= 0) & (ids_TK < experts), (ids_TK + 1) % experts, ids_TK)
    return replace(inputs, x_TD=-inputs.x_TD.flip(0), routed=Routed(ids_TK, inputs.routed.weights_TK.flip(0)))


class Trial:
    """One backend in this process; its layout of a part's weights is kept for the next case of the same part."""

    def __init__(self, backend: str, here: Device, results: Path) -> None:
        self._backend = backend
        self._device = here
        self._results = results
        self._bound: tuple[tuple[object, ...], Candidate] | None = None

    def run(self, number: str, case: Case) -> Notes:
        """The case, as far as the backend does not decline it."""
        self._begin(number, Step.ASK)
        refusal = decline(self._backend, case, self._device)
        if refusal is not None:
            packages = missing_packages(registry_of(case.part.role).get(self._backend).facts.packages)
            return Notes(refusal.reasons, missing=set(refusal.reasons) <= set(packages))
        self._begin(number, Step.BUILD)
        inputs = build(case, self._device.torch_device)
        before = _checksums(inputs)
        self._begin(number, Step.PREPARE)
        candidate = self._bind(case, inputs)

        workspace = Workspace(self._device.torch_device)
        for step in (Step.FRESH, Step.WARM):
            self._begin(number, step)
            poison(workspace.buffers)
            output = self._output(candidate)
            candidate.run(output.out, workspace)
            self._keep(number, step, output)
        after = _checksums(candidate.inputs)
        if self._device.key != "cpu" and candidate.graph_safe and case.tokens:
            self._begin(number, Step.REPLAY)
            self._keep(number, Step.REPLAY, self._replay(case, candidate, workspace))
        changed = tuple(name for name in before if before[name] != after[name])
        return Notes(deterministic=candidate.facts.deterministic, changed=changed)

    def _begin(self, number: str, step: Step) -> None:
        write(self._results, f"{number}.{step}")

    def _keep(self, number: str, step: Step, output: PoisonedOutput) -> None:
        # An accelerator reports what went wrong in a kernel only when it is waited for, as this does.
        write(self._results, f"{number}.{step}.out", output.to_bytes())

    def _bind(self, case: Case, inputs: Inputs) -> Candidate:
        weights = (case.part, case.directory, case.seed)
        if self._bound is None or self._bound[0] != weights:
            self._bound = None
            self._bound = (weights, Candidate.bind(case.part, self._backend, inputs))
        return self._bound[1].on(inputs)

    def _output(self, candidate: Candidate) -> PoisonedOutput:
        tokens = candidate.tokens
        return PoisonedOutput.allocate(len(tokens), candidate.width, tokens.dtype, tokens.device)

    def _replay(self, case: Case, candidate: Candidate, workspace: Workspace) -> PoisonedOutput:
        """Captures a call as it is, then replays it where only the contents of its tensors have changed."""
        output = self._output(candidate)
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            candidate.run(output.out, workspace)
        others = tensors(other_tokens(case, candidate.inputs))
        for name, tensor in tensors(candidate.inputs).items():
            if tensor is not others[name]:
                tensor.copy_(others[name])
        poison(workspace.buffers)
        graph.replay()
        return output


def _checksums(inputs: Inputs) -> Mapping[str, int]:
    return {name: checksum(tensor) for name, tensor in tensors(inputs).items()}
