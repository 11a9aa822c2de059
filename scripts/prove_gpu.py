"""Proves every backend of this device for all that it declares: problems are derived from its facts.

    python scripts/prove_gpu.py results/h200-proof.jsonl [--backends NAMES] [--budget SECONDS] [--device cpu]

One record per backend and problem: how many cases were proven, and every one that was not. Several backends and formats
are proven at a time, each in processes of its own. What the budget leaves undone is told, and makes the exit code 1.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import lcm
from pathlib import Path
from typing import Any

import torch
from setting import setting

from muster.device import Device, cpu, cuda
from muster.formats.spec import FORMATS, Format
from muster.gemm.backend import LinearFacts
from muster.gemm.problem import LinearProblem
from muster.lab.ledger.evidence import Verdict
from muster.lab.prove.cases import Case, Part, Role, cases, decline
from muster.lab.prove.contender import registry_of
from muster.lab.prove.finding import Finding
from muster.lab.prove.isolate import Limits
from muster.lab.prove.parts import Problem
from muster.lab.prove.proving import prove
from muster.moe.backend import Facts
from muster.moe.problem import Activation, MoEProblem, RoutingRule

ALL_TOKENS, FEW_TOKENS = (1, 3, 8, 33, 100, 129, 700), (1, 33, 129)
"""Of a plain problem, with every routing pattern; of one with traits, with those that most often go wrong."""
LIMIT = 7.0
GOOD = (Verdict.PROVEN, Verdict.DECLINED)


@dataclass(frozen=True)
class Job:
    """What one worker does in one go.

    Attributes:
        role: of the backend.
        backend: its name.
        format: of all its problems.
        on: "cuda" or "cpu".
        end: seconds of the system's clock at which to stop.
    """

    role: Role
    backend: str
    format: str
    on: str
    end: float


@dataclass
class Count:
    """What came of a backend on one problem.

    Attributes:
        verdicts: how many of each.
        closest: the largest part of its limit that any error was.
        failures: cases and what was seen.
        undone: cases that there was no time for.
    """

    verdicts: Counter[str] = field(default_factory=Counter)
    closest: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    undone: int = 0

    def add(self, finding: Finding) -> None:
        """One case more."""
        self.verdicts[finding.verdict.value] += 1
        errors, case = finding.errors, finding.case
        if errors is not None and errors.whole is not None and errors.worst_token is not None:
            shares = errors.whole / errors.limit_whole, errors.worst_token / errors.limit_worst_token
            self.closest = max(self.closest, *shares)
        if finding.verdict not in GOOD:
            seen = {"tokens": case.tokens, "pattern": case.pattern, "verdict": finding.verdict.value}
            self.failures.append({**seen, "message": finding.message[-600:], "case": case.to_json()})


class TimeUpError(Exception):
    """The budget is spent."""


def expert_problems(facts: Facts, format: Format) -> Iterator[MoEProblem]:
    """A plain layer, one for each further activation and dtype, and two with all the traits at once, of odd sizes."""
    dtypes = sorted(facts.dtypes, key=("bf16", "f32", "f16").index)
    names = sorted(facts.activations, key=lambda name: (name != "silu", name))
    usual = MoEProblem(
        512, 256, 32, RoutingRule(4), 32, weights=format, dtype=dtypes[0], activation=Activation(names[0])
    )
    yield usual
    small = replace(usual, experts=16, local_experts=16)
    hidden, inner = (_multiple(least, format) for least in (facts.hidden_multiple, facts.inner_multiple))
    odd = replace(small, hidden=5 * hidden, inner=3 * inner)
    yield from (replace(odd, activation=Activation(name)) for name in names[1:])
    yield from (replace(small, dtype=dtype) for dtype in dtypes[1:])
    if facts.act_order and format.family == "int4":
        yield replace(small, act_order=True)
    for name in (names[0], names[-1]):
        yield replace(
            odd,
            activation=Activation(name, LIMIT if facts.clamp and name != "relu2" else None),
            bias=facts.bias,
            router_weight_on_input=facts.router_weight_on_input and name == names[0],
            local_experts=5 if facts.sentinel_ids else 16,
            first_expert=6 if facts.sentinel_ids else 0,
        )


def linear_problems(facts: LinearFacts, format: Format) -> Iterator[LinearProblem]:
    """A plain matrix, one of odd sizes with a bias, and one for each further dtype."""
    dtypes = sorted(facts.dtypes, key=("bf16", "f32", "f16").index)
    usual = LinearProblem(768, 512, format, dtypes[0])
    yield usual
    rows = lcm(facts.rows_multiple, 2 if format.global_scale else 1)
    yield replace(usual, rows=77 * rows, columns=5 * _multiple(facts.columns_multiple, format), bias=facts.bias)
    yield from (replace(usual, dtype=dtype) for dtype in dtypes[1:])
    if facts.act_order and format.family == "int4":
        yield replace(usual, act_order=True)


def wanted(job: Job, here: Device) -> dict[Part, tuple[Case, ...]]:
    """The cases of a job that the backend takes."""
    facts = registry_of(job.role).get(job.backend).facts
    make = linear_problems if job.role is Role.LINEARS else expert_problems
    found: dict[Part, tuple[Case, ...]] = {}
    for number, problem in enumerate(dict.fromkeys(make(facts, FORMATS[job.format]))):
        part = Part(job.role, _taken(job, problem, here), f"problem {number}", 1)
        tokens = [count for count in (FEW_TOKENS if number else ALL_TOKENS) if count <= (facts.max_tokens or count)]
        several = cases(part, tokens, None, quick=number > 0, seeds=(number % 2,))
        found[part] = tuple(case for case in several if decline(job.backend, case, here) is None)
    return {part: several for part, several in found.items() if several}


def run(job: Job) -> dict[str, Count]:
    """Proves the cases of a job, problem by problem; in a process of its own."""
    torch.set_num_threads(1)
    here = cuda() if job.on == "cuda" else cpu()
    parts = wanted(job, here)
    counts = {part.key: Count(undone=len(several)) for part, several in parts.items()}

    def tell(finding: Finding) -> None:
        count = counts[finding.case.part.key]
        count.add(finding)
        count.undone -= 1
        if time.time() > job.end:
            raise TimeUpError

    every = [case for several in parts.values() for case in several]
    if time.time() < job.end:
        with suppress(TimeUpError):
            prove(job.backend, every, Limits(seconds=120.0), tell, here=here)
    return counts


def jobs(here: Device, only: Sequence[str], end: float) -> Iterator[Job]:
    """One for each backend of this device and format that it reads; those for one kind of device first."""
    for role in (Role.EXPERTS, Role.LINEARS):
        registry = registry_of(role)
        names = [name for name in registry.names() if here.key in registry.get(name).facts.devices]
        for name in sorted(names, key=lambda name: "cpu" in registry.get(name).facts.devices):
            if not only or name in only:
                weights = registry.get(name).facts.weights
                formats = (format.name for format in FORMATS.values() if format.family in weights)
                yield from (Job(role, name, format, here.torch_device.type, end) for format in formats)


def main() -> None:
    """Prints what was not proven, and a count of each verdict."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("records", type=Path)
    parser.add_argument("--backends", default="", help="Names with commas between them; default: all.")
    parser.add_argument("--budget", type=float, default=300.0, help="Seconds for all of it.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    given = parser.parse_args()
    # Many processes share the cores.
    os.environ |= {"MUSTER_THREADS": "1", "OMP_NUM_THREADS": "1"}
    here = cuda() if given.device == "cuda" else cpu()
    wanted = list(jobs(here, [name for name in given.backends.split(",") if name], time.time() + given.budget))
    sums: dict[tuple[str, str], Counter[str]] = {}
    about = {**setting("triton" if here.key != "cpu" else "numpy"), "device": here.name}
    spawn = multiprocessing.get_context("spawn")
    with given.records.open("w") as records, ProcessPoolExecutor(given.workers, spawn) as pool:
        running: dict[Future[dict[str, Count]], Job] = {pool.submit(run, job): job for job in wanted}
        for future in as_completed(running):
            job = running[future]
            error = future.exception()
            if error is not None:
                sums.setdefault((job.role.value, job.backend), Counter())["broken jobs"] += 1
                print(f"{job.role}, {job.backend}, {job.format}: {type(error).__name__}: {error}", flush=True)
                continue
            for key, count in future.result().items():
                record = {"role": job.role.value, "backend": job.backend, "part": key, **vars(count), **about}
                records.write(json.dumps(record) + "\n")
                total = sums.setdefault((job.role.value, job.backend), Counter())
                total.update(count.verdicts)
                total["undone"] += count.undone
                for failure in count.failures:
                    print(job.backend, key, *(failure[name] for name in ("tokens", "pattern", "verdict", "message")))
            records.flush()
            print(f"{job.role}, {job.backend}, {job.format}: done", flush=True)
    for (role, backend), total in sums.items():
        print(f"{role} {backend}:", ", ".join(f"{count} {verdict}" for verdict, count in total.items() if count))
    good = {verdict.value for verdict in GOOD}
    raise SystemExit(any(count for total in sums.values() for verdict, count in total.items() if verdict not in good))


def _multiple(least: int, format: Format) -> int:
    """Columns that both the backend's kernel and the format can cut, and no fewer than eight."""
    unit = (format.block or (1, 1))[1] if format.element.bits == 4 else 1
    return lcm(least, unit, 8)


def _taken(job: Job, problem: Problem, here: Device) -> Problem:
    """The problem, twice or four times as wide where the backend asks for more than its multiples say."""
    supports = registry_of(job.role).get(job.backend).supports
    if isinstance(problem, LinearProblem):
        widened = (replace(problem, columns=factor * problem.columns) for factor in (1, 2, 4))
    else:
        pairs = ((factor * problem.hidden, factor * problem.inner) for factor in (1, 2, 4))
        widened = (replace(problem, hidden=hidden, inner=inner) for hidden, inner in pairs)  # type: ignore[assignment]
    return next((each for each in widened if supports(each, here) is None), problem)


if __name__ == "__main__":
    main()
