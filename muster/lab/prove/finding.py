"""What came of a backend on a case, from what its isolated process left.

| verdict | what was seen |
| --- | --- |
| PROVEN | every output whole, inside its bounds and close to the reference; the same bits twice where declared |
| OUT_OF_BOUNDS | memory beside an output, or an input, is no longer as it was |
| PARTIAL_WRITE | elements of an output were never written |
| NAN | values that are not finite where the reference is |
| WRONG | too far from the reference, or other bits the second time from a backend that declares to be deterministic |
| CRASH | a signal, an exception or an exit before there was a result, or when nothing should have been running |
| HANG | one step took longer than `Limits.seconds` |
| OUT_OF_MEMORY | memory ran out, or it was killed for holding more than `Limits.memory_bytes` |
| MISSING | packages that it needs are not there, and nothing else stands in the way |
| DECLINED | it says that it cannot, or is not meant to, compute the case |
| NOT_TRIED | the case could not be built, too many processes had failed, or the device no longer answered |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import torch

from muster.device import DTYPES
from muster.lab.ledger.evidence import Errors, Verdict
from muster.lab.prove.cases import Case, Inputs, build
from muster.lab.prove.isolate import Outcome
from muster.lab.prove.poison import PoisonedOutput
from muster.lab.prove.tolerance import judge
from muster.lab.prove.trial import RUNS, Notes, Step, other_tokens
from muster.moe.problem import MoEProblem

_DOING: Mapping[Step | None, str] = MappingProxyType(
    {
        None: "starting",
        Step.ASK: "asking the backend",
        Step.BUILD: "building the case",
        Step.PREPARE: "preparing the weights",
        Step.FRESH: "first run",
        Step.WARM: "second run",
        Step.REPLAY: "graph replay",
    }
)


@dataclass(frozen=True)
class Finding:
    """What came of a backend on a case.

    Attributes:
        case: the case.
        verdict: see the table of this module.
        errors: the distances, None when there was no whole output to judge.
        deterministic: whether two runs gave the same bits; None when it did not run twice.
        message: one line on what was seen, empty when there is nothing to say.
        seconds: how long it took, the start of the process included for the first case in it.
    """

    case: Case
    verdict: Verdict
    errors: Errors | None = None
    deterministic: bool | None = None
    message: str = ""
    seconds: float = 0.0


def of_results(backend: str, case: Case, trial: Path, device: torch.device) -> Finding:
    """Judges a complete case.

    Args:
        backend: its name.
        case: the case.
        trial: the path of its files without their endings.
        device: where the reference is computed.
    """
    notes = Notes.read(trial.with_suffix(".json"))
    if notes.declined:
        return Finding(case, Verdict.MISSING if notes.missing else Verdict.DECLINED, message="; ".join(notes.declined))
    outputs = {run: _read(case, path) for run in RUNS if (path := trial.with_suffix(f".{run}.out")).exists()}
    deterministic = torch.equal(outputs[Step.FRESH].whole, outputs[Step.WARM].whole)
    if notes.changed:
        message = f"it wrote into its inputs: {', '.join(notes.changed)}"
        return Finding(case, Verdict.OUT_OF_BOUNDS, deterministic=deterministic, message=message)

    proven: Errors | None = None
    for run, output in outputs.items():
        if run is Step.WARM and deterministic:
            continue
        verdict, errors, message = _of_output(backend, case, run, output, device)
        if verdict is not Verdict.PROVEN:
            return Finding(case, verdict, errors, deterministic, f"{_DOING[run]}: {message}")
        proven = proven or errors
    if notes.deterministic and not deterministic:
        message = "it declares to be deterministic and gave other bits the second time"
        return Finding(case, Verdict.WRONG, proven, deterministic, message)
    return Finding(case, Verdict.PROVEN, proven, deterministic)


def of_death(case: Case, step: Step | None, outcome: Outcome) -> Finding:
    """Says why the process ended at `step` of the case (None: before its first).

    What ends before the backend is reached says nothing of it.
    """
    end = outcome.describe()
    if outcome.failure is None and outcome.exit_code is not None:
        end = f"exited with code {outcome.exit_code} before there was a result"
    return Finding(case, _verdict_of_death(step, outcome), message=f"{_DOING[step]}: {end}")


def _verdict_of_death(step: Step | None, outcome: Outcome) -> Verdict:
    if step in (None, Step.BUILD):
        return Verdict.NOT_TRIED
    if outcome.failure is not None and outcome.failure.type == "ModuleNotFoundError":
        return Verdict.MISSING
    if outcome.out_of_memory:
        return Verdict.OUT_OF_MEMORY
    return Verdict.HANG if outcome.timed_out else Verdict.CRASH


def _read(case: Case, path: Path) -> PoisonedOutput:
    problem = case.part.problem
    width = problem.hidden if isinstance(problem, MoEProblem) else problem.rows
    output = PoisonedOutput.from_bytes(path.read_bytes(), width, DTYPES[problem.dtype])
    path.unlink()
    return output


def _of_output(
    backend: str, case: Case, run: Step, output: PoisonedOutput, device: torch.device
) -> tuple[Verdict, Errors | None, str]:
    if outside := output.outside:
        return Verdict.OUT_OF_BOUNDS, None, f"{outside} elements before or after the output were written"
    if unwritten := output.unwritten:
        return Verdict.PARTIAL_WRITE, None, f"{unwritten} of {output.out.numel()} elements were never written"
    inputs: Inputs = build(case, device)
    if run is Step.REPLAY:
        inputs = other_tokens(case, inputs)
    verdict, errors = judge(output.out.to(device), case, inputs, backend)
    return verdict, errors, "" if verdict is Verdict.PROVEN else _describe(verdict, errors, output)


def _describe(verdict: Verdict, errors: Errors, output: PoisonedOutput) -> str:
    if verdict is Verdict.NAN:
        bad = int((~output.out.isfinite()).sum())
        return f"{bad} of {output.out.numel()} elements are NaN or infinite"
    return (
        f"relative RMS {errors.whole:.2g} (limit {errors.limit_whole:.2g}), "
        f"worst token {errors.worst_token:.2g} (limit {errors.limit_worst_token:.2g})"
    )
