"""Plans on disk: one file per checkpoint and device, found again as long as all the evidence it rests on counts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster import env
from muster.device import Device
from muster.errors import EnvironmentLackError, FormatError, MusterError
from muster.lab.ledger.ledger import Ledger
from muster.lab.prove.cases import Part
from muster.lab.prove.contender import Contender, registry_of
from muster.lab.prove.standing import Standings
from muster.plan import Choice, Loser, Plan, PlanEntry

VERSION = 1


@dataclass(frozen=True)
class Shelf:
    """Where the plans of this machine lie.

    Attributes:
        home: MUSTER_HOME.
        device: what they are for.
    """

    home: Path
    device: Device

    def path(self, directory: Path) -> Path:
        """The file of a checkpoint's plan; on a processor, for as many threads as it is to use now."""
        threads = env.read().threads if self.device.key == "cpu" else 0
        words = (str(directory.absolute()), self.device.key, self.device.name, str(threads))
        key = hashlib.sha256("\n".join(words).encode()).hexdigest()
        return self.home / "plans" / f"{key[:16]}.json"

    def save(self, directory: Path, parts: Sequence[Part], plan: Plan) -> Path:
        """Writes a plan, whole or not at all, and answers where.

        Raises:
            EnvironmentLackError: it cannot be written there.
        """
        path = self.path(directory)
        partial = path.with_suffix(f".{os.getpid()}")
        text = json.dumps(document(directory, self.device, parts, plan), indent=2) + "\n"
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            partial.write_text(text, encoding="utf-8")
            partial.replace(path)
        except OSError as error:
            hint = "set MUSTER_HOME to one"
            expected = "a directory to write in"
            raise EnvironmentLackError(f"plan {path}", found=str(error), expected=expected, hint=hint) from error
        return path

    def find(self, directory: Path, parts: Sequence[Part], ledger: Ledger) -> tuple[Plan | None, tuple[str, ...]]:
        """The plan of a checkpoint whose evidence all counts; else None and why, nothing if there was never one."""
        path = self.path(directory)
        if not path.exists():
            return None, ()
        try:
            choices, remarks = _read(path)
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            return None, (f"{path} cannot be read: {type(error).__name__} {error}",)
        except FormatError as error:
            return None, (str(error),)
        missing = tuple(f"it has nothing for {part.key}" for part in parts if part.key not in choices)
        standings = Standings(ledger, self.device)
        reasons = missing or tuple(
            dict.fromkeys(
                reason
                for part in parts
                for name in choices[part.key].backends
                for reason in _against(choices[part.key], Contender(part, name), ledger, standings)
            )
        )
        if reasons:
            return None, reasons
        return Plan(MappingProxyType({(part.role, part.problem): choices[part.key] for part in parts}), remarks), ()


def document(directory: Path, device: Device, parts: Sequence[Part], plan: Plan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "version": VERSION,
        "model": str(directory.absolute()),
        "device": device.name,
        "proven": plan.proven,
        "parts": {part.key: asdict(plan.choice(part.role, part.problem)) for part in parts},
        "remarks": list(plan.remarks),
    }


def _read(path: Path) -> tuple[Mapping[str, Choice], tuple[str, ...]]:
    """Choices by the keys of their parts, and remarks; raises whatever comes of a file that holds something else."""
    saved = json.loads(path.read_text(encoding="utf-8"))
    if saved["version"] != VERSION:
        raise FormatError(f"plan {path}", found=f"version {saved['version']}", expected=f"version {VERSION}")
    return {key: _choice(fields) for key, fields in saved["parts"].items()}, tuple(saved["remarks"])


def _choice(fields: Mapping[str, Any]) -> Choice:
    entries = tuple(PlanEntry(**{name: _tuples(value) for name, value in entry.items()}) for entry in fields["entries"])
    losers = tuple(Loser(**{name: _tuples(value) for name, value in loser.items()}) for loser in fields["losers"])
    if not entries or entries[-1].max_tokens is not None or not all(entry.evidence for entry in entries):
        raise ValueError("a choice that is open at the end or lacks evidence")
    return Choice(entries, losers, fields["dispatcher"])


def _tuples(value: Any) -> Any:
    """JSON has lists where a plan has tuples."""
    return tuple(value) if isinstance(value, list) else value


def _against(choice: Choice, contender: Contender, ledger: Ledger, standings: Standings) -> Iterator[str]:
    """Why a backend may no longer run what a choice lets it run: evidence that does not count, failures since."""
    name = contender.backend
    if name not in registry_of(contender.part.role).names():
        yield f"{name} is no longer installed"
        return
    counting = {row.id: row for row in standings.counting(contender).values()}
    for row in counting.values():
        if row.verdict.failed and choice.backend_for(row.tokens) == name:
            yield f"{name} has failed at {row.tokens} tokens: {row.message} (evidence {row.id})"
    rests_on = {id for entry in choice.entries if entry.backend == name for id in entry.evidence}
    for id in sorted(rests_on - counting.keys()):
        # One that a newer verdict on the same case stands in for counts as well as ever.
        try:
            row = ledger.get(id)
        except MusterError:
            yield f"{name}: evidence {id} is not in {ledger.path}"
        else:
            reasons = ledger.counts(row, standings.environment(contender), standings.source(contender))
            yield from (f"{name}: {reason}" for reason in reasons)
