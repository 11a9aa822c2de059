"""Proving a backend: its cases run in isolated processes (`trial`), and this clean process says what came of each.

A process that fails costs its own case alone: earlier cases keep their verdicts, later ones go on in a new process.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from muster import device
from muster.device import Device, release_memory
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove import isolate
from muster.lab.prove.cases import Case, forget
from muster.lab.prove.finding import Finding, of_death, of_results
from muster.lab.prove.isolate import Limits, Outcome
from muster.lab.prove.trial import Step

__all__ = ["Finding", "probe", "prove"]

MAX_FAILURES = 3
"""Processes of one backend that may fail before the rest of its cases are not tried."""
PROBE_SECONDS = 60.0
"""How long a device may take to multiply two small matrices in a new process."""
_MEMORY_SHARE = 0.9
"""Of the free memory: what a backend may take unless told otherwise."""


def prove(
    backend: str,
    cases: Sequence[Case],
    limits: Limits,
    on_result: Callable[[Finding], None],
    *,
    here: Device | None = None,
    environment: Mapping[str, str] | None = None,
) -> None:
    """Proves a backend on each case, in order, and tells what came of it as soon as nothing can change it any more.

    Args:
        backend: its name, known to the registry of the cases' role; all cases are of one kind, experts or linears.
        cases: what to prove it on; neighbours of one part share its layout.
        limits: of each process; `seconds` are for one step of a case. Without a limit of memory, nine tenths of what is
            free.
        on_result: called once for each case.
        here: the device; None: the processor.
        environment: the environment variables of the processes; None: those of this one.
    """
    prover = _Prover(backend, cases, limits, on_result, here or device.cpu(), environment)
    try:
        while prover.open:
            release_memory()
            prover.run_process()
    finally:
        forget()
        release_memory()


class _Prover:
    """The cases of one backend that have no finding yet, by number.

    The last finding of a process is held until its end is known: what happens then may be the backend's doing too.
    """

    def __init__(
        self,
        backend: str,
        cases: Sequence[Case],
        limits: Limits,
        on_result: Callable[[Finding], None],
        here: Device,
        environment: Mapping[str, str] | None,
    ) -> None:
        self.open = dict(enumerate(cases))
        self._backend = backend
        self._limits = limits
        self._on_result = on_result
        self._device = here
        self._environment = environment
        self._failures = 0
        self._held: Finding | None = None
        self._told_at = 0.0

    def run_process(self) -> None:
        """Runs open cases in one process, up to its end or to the first that ends it."""
        self._told_at = 0.0
        payload = {
            "backend": self._backend,
            "device": self._device.torch_device.type,
            "cases": {_name(number): case.to_json() for number, case in self.open.items()},
        }
        with isolate.run(
            "muster.lab.prove.trial:compute",
            payload,
            self._process_limits(),
            on_result=self._take,
            environment=self._environment,
        ) as outcome:
            failed = self._blame(outcome)
        self._failures += failed
        if outcome.left_behind:
            self._add(f"{outcome.left_behind} processes that it had started were left and have been killed")
        if outcome.immortal:
            self._add(f"{outcome.immortal} of its processes cannot be killed")
        # A processor that runs this program needs no asking.
        trouble = None if self._device.key == "cpu" else probe(self._device)
        if trouble is not None:
            self._add(trouble)
        self._hold(None)
        if trouble is not None:
            self._give_up(trouble)
        elif self._failures >= MAX_FAILURES:
            self._give_up(f"{self._failures} processes of this backend had failed")

    def _process_limits(self) -> Limits:
        if self._limits.memory_bytes is not None:
            return self._limits
        return replace(self._limits, memory_bytes=int(device.free_memory() * _MEMORY_SHARE))

    def _take(self, path: Path, at: float) -> None:
        """A file has appeared; the notes of a case complete it."""
        if path.suffix != ".json":
            return
        case = self.open.pop(int(path.stem))
        finding = of_results(self._backend, case, path.with_suffix(""), self._device.torch_device)
        self._hold(replace(finding, seconds=at - self._told_at))
        self._told_at = at

    def _blame(self, outcome: Outcome) -> bool:
        """Whether the process failed; if so the case that it was at, or the one before, gets the blame."""
        number = next(iter(self.open), None)
        step = None if number is None else _last_step(outcome.results, number)
        if outcome.good and step is None and self._held is not None:
            return False
        between_cases = step in (None, Step.BUILD)
        killed = outcome.signal is not None or (outcome.failure is None and outcome.exit_code is not None)
        if self._held is not None and between_cases and (killed or number is None):
            # Only what the backend has left behind can have ended the process there.
            message = f"after the case was complete: {outcome.describe()}"
            self._held = replace(self._held, verdict=Verdict.CRASH, message=message)
            return True
        assert number is not None, "a process without an open case has completed one"
        finding = of_death(self.open.pop(number), step, outcome)
        self._hold(replace(finding, seconds=outcome.seconds - self._told_at))
        return True

    def _hold(self, finding: Finding | None) -> None:
        """Lets go of the finding that is held, for the next one."""
        if self._held is not None:
            self._on_result(self._held)
        self._held = finding

    def _add(self, remark: str) -> None:
        assert self._held is not None, "every process has at least one finding"
        self._held = replace(self._held, message="; ".join(filter(None, (self._held.message, remark))))

    def _give_up(self, reason: str) -> None:
        while self.open:
            self._on_result(Finding(self.open.pop(next(iter(self.open))), Verdict.NOT_TRIED, message=reason))


def probe(here: Device) -> str | None:
    """None when the device computes in a fresh process, else what it did instead."""
    payload = {"device": here.torch_device.type}
    with isolate.run("muster.lab.prove.trial:answer", payload, Limits(seconds=PROBE_SECONDS)) as outcome:
        if (outcome.results / "ok").exists():
            return None
        return f"the device no longer answers: {outcome.describe()}"


def _name(number: int) -> str:
    return f"{number:05}"


def _last_step(results: Path, number: int) -> Step | None:
    return next((step for step in reversed(Step) if (results / f"{_name(number)}.{step}").exists()), None)
