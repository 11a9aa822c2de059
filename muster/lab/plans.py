"""Plans on disk: one file per checkpoint and device, found again as long as all its evidence counts."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from muster.device import Device
from muster.errors import MusterError
from muster.lab.cases import Part
from muster.lab.contender import Contender
from muster.lab.ledger import Ledger
from muster.lab.standing import Standings
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
        """The file of a checkpoint's plan."""
        key = hashlib.sha256(f"{directory.absolute()}\n{self.device.key}\n{self.device.name}".encode()).hexdigest()
        return self.home / "plans" / f"{key[:16]}.json"

    def save(self, directory: Path, parts: Sequence[Part], plan: Plan) -> Path:
        """Writes a plan, whole or not at all, and answers where."""
        path = self.path(directory)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(document(directory, self.device, parts, plan), indent=2) + "\n")
        draft.replace(path)
        return path

    def find(self, directory: Path, parts: Sequence[Part], ledger: Ledger) -> tuple[Plan | None, tuple[str, ...]]:
        """The plan of a checkpoint whose evidence all counts; else None and why, nothing if there was never one."""
        path = self.path(directory)
        if not path.exists():
            return None, ()
        try:
            saved = json.loads(path.read_text())
            if saved["version"] != VERSION:
                return None, (f"{path} is of version {saved['version']}, this is {VERSION}",)
            choices = {key: _choice(choice) for key, choice in saved["parts"].items()}
            remarks = tuple(saved["remarks"])
        except (ValueError, LookupError, TypeError) as error:
            return None, (f"{path} cannot be read: {type(error).__name__} {error}",)
        missing = [part.key for part in parts if part.key not in choices]
        if missing:
            return None, tuple(f"it has nothing for {key}" for key in missing)
        plan = Plan(MappingProxyType({(part.role, part.problem): choices[part.key] for part in parts}), remarks)
        reasons = tuple(dict.fromkeys(_against(parts, choices, ledger, Standings(ledger, self.device))))
        return (None, reasons) if reasons else (plan, ())


def document(directory: Path, device: Device, parts: Sequence[Part], plan: Plan) -> dict[str, Any]:
    """A plan as JSON."""
    return {
        "version": VERSION,
        "checkpoint": str(directory.absolute()),
        "device": device.name,
        "parts": {part.key: asdict(plan.choice(part.role, part.problem)) for part in parts},
        "remarks": list(plan.remarks),
    }


def _choice(data: Mapping[str, Any]) -> Choice:
    entries = tuple(PlanEntry(**{**entry, "evidence": tuple(entry["evidence"])}) for entry in data["entries"])
    losers = tuple(Loser(loser["backend"], tuple(loser["reasons"])) for loser in data["losers"])
    if not entries or entries[-1].max_tokens is not None:
        raise ValueError("a choice whose last entry has a bound")
    return Choice(entries, losers, data["dispatcher"])


def _against(
    parts: Sequence[Part], choices: Mapping[str, Choice], ledger: Ledger, standings: Standings
) -> Sequence[str]:
    """Why evidence that a plan rests on does not count any more."""
    reasons = []
    for part in parts:
        for entry in choices[part.key].entries:
            contender = Contender(part, entry.backend)
            now, source = standings.environment(contender), standings.source(contender)
            reasons += [
                f"{entry.backend} has failed since: {row.message} (evidence {row.id})"
                for row in standings.counting(contender).values()
                if row.verdict.failed and choices[part.key].backend_for(row.tokens) == entry.backend
            ]
            for id in entry.evidence:
                try:
                    reasons += [f"{entry.backend}: {reason}" for reason in ledger.counts(ledger.get(id), now, source)]
                except MusterError:
                    reasons.append(f"{entry.backend}: evidence {id} is not in {ledger.path}")
    return reasons
