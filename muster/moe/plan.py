"""The plan: one frozen choice of backend per token count, why it was chosen, and why each other backend lost."""

from __future__ import annotations

from dataclasses import dataclass

from muster.contract import Decline
from muster.device import Device
from muster.errors import UsageError
from muster.moe.backend import AnyBackend, RunnerCore
from muster.moe.problem import MoEProblem
from muster.moe.registry import backends


@dataclass(frozen=True)
class PlanEntry:
    """What runs for token counts up to a bound.

    Attributes:
        max_tokens: the bound, itself included; None: no bound.
        backend: its name.
        reason: why it and no other, in a few words.
    """

    max_tokens: int | None
    backend: str
    reason: str


@dataclass(frozen=True)
class Loser:
    """A backend that runs for no token count, and every reason."""

    backend: str
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """The only truth about what runs.

    Attributes:
        entries: by rising bound; the last has none.
        losers: every other known backend.
        dispatcher: who moves tokens for the runner cores.
    """

    entries: tuple[PlanEntry, ...]
    losers: tuple[Loser, ...]
    dispatcher: str = "standard"

    @property
    def backends(self) -> tuple[str, ...]:
        """The names that run, by rising token count."""
        return tuple(entry.backend for entry in self.entries)

    def backend_for(self, tokens: int) -> str:
        """The name of the backend that runs for that many tokens."""
        return next(e.backend for e in self.entries if e.max_tokens is None or tokens <= e.max_tokens)

    def describe(self) -> str:
        """One line: what runs for which token counts, what lost and why."""
        winners = ", ".join(f"{entry.backend} {self._reach(entry)} ({entry.reason})" for entry in self.entries)
        losers = ", ".join(f"{loser.backend} ({'; '.join(loser.reasons)})" for loser in self.losers)
        return f"experts: {winners}" + (f"; lost: {losers}" if losers else "")

    def _reach(self, entry: PlanEntry) -> str:
        if entry.max_tokens is not None:
            return f"for up to {entry.max_tokens} tokens"
        return "above" if len(self.entries) > 1 else "for any token count"


def resolve(problem: MoEProblem, device: Device, requested: str | None = None) -> Plan:
    """The plan for `problem` on `device`; every registered backend is considered.

    Until there is evidence, the order is by declared facts: a backend meant for few tokens first, up to its bound;
    then the backends for any count, in the order of the registry.

    Args:
        problem: what must be computed.
        device: where.
        requested: the backend the user named, None to choose. One meant for few tokens is completed above its bound.

    Raises:
        UsageError: an unknown name, a requested backend that cannot run, or none that can for every token count.
            All reasons are in it.
    """
    if requested is not None:
        backends().get(requested)
    able, losers = _consider(problem, device)
    if requested is not None and requested not in able:
        raise _refusal(
            f"expert-layer backend {requested!r} cannot run here", [e for e in losers if e.backend == requested], able
        )
    entries = _entries(able, requested)
    if not entries or entries[-1].max_tokens is not None:
        raise _refusal("no expert-layer backend runs every token count here", losers, able)
    winners = dict.fromkeys(entry.backend for entry in entries)
    ahead = f"{requested} was asked for" if requested else f"behind {' and '.join(winners)} while nothing is measured"
    losers += [Loser(name, (ahead,)) for name in able if name not in winners]
    return Plan(entries, tuple(losers))


def _refusal(thing: str, losers: list[Loser], able: dict[str, AnyBackend]) -> UsageError:
    reasons = [UsageError(f"{loser.backend}: {reason}") for loser in losers for reason in loser.reasons]
    return UsageError(thing, reasons=reasons, hint=f"can run: {', '.join(able) or 'none'}")


def _consider(problem: MoEProblem, device: Device) -> tuple[dict[str, AnyBackend], list[Loser]]:
    """The backends that can, and those that cannot with their reasons; a broken plug-in is one of the latter."""
    able: dict[str, AnyBackend] = {}
    losers = []
    for name in backends().names():
        try:
            backend = backends().get(name)
        except UsageError as error:
            losers.append(Loser(name, (" ".join(str(error).split()),)))
            continue
        decline: Decline | None = backend.supports(problem, device)
        if decline is None:
            able[name] = backend
        else:
            losers.append(Loser(name, decline.reasons))
    return able, losers


def _entries(able: dict[str, AnyBackend], requested: str | None) -> tuple[PlanEntry, ...]:
    bounded = [(b.facts.max_tokens, name) for name, b in able.items() if b.facts.max_tokens is not None]
    unbounded = sorted(
        (name for name, b in able.items() if b.facts.max_tokens is None),
        key=lambda name: not isinstance(able[name], RunnerCore),
    )
    if requested is not None:
        bounded = [pair for pair in bounded if pair[1] == requested]
        unbounded = [requested] if not bounded else unbounded
    entries: list[PlanEntry] = []
    for bound, name in sorted(bounded, key=lambda pair: pair[0]):
        if not entries or bound != entries[-1].max_tokens:
            entries.append(PlanEntry(bound, name, "asked for" if name == requested else "meant for few tokens"))
    for name in unbounded[:1]:
        if name == requested:
            reason = "asked for"
        elif requested is not None:
            reason = f"completes {requested}, which is meant for few tokens"
        else:
            reason = "runs any token count"
        entries.append(PlanEntry(None, name, reason))
    return tuple(entries)
