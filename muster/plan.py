"""The plan: for every part of a model one frozen choice of backend per token count, why, and why not the others.

It is the only truth about what runs. A plan made from evidence names it; `by_facts` chooses by declared facts alone,
for those who insist on running what nobody has proven.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Protocol

from muster.contract import Decline, Registry
from muster.device import Device
from muster.errors import UnprovenError, UsageError


class Role(StrEnum):
    """What a part does in the model; each has its own plan entries and its own proof."""

    EXPERTS = "experts"
    DRAFT = "draft"
    LINEARS = "linears"


Range = tuple[float, float]
"""The least and the most of something, over token counts or parts."""


@dataclass(frozen=True)
class PlanEntry:
    """What runs for token counts up to a bound.

    Attributes:
        max_tokens: the bound, itself included; None: no bound.
        backend: its name.
        reason: why it and no other, in a few words.
        evidence: ids of the evidence it rests on; none when it is unproven.
        ahead: how many times as fast it is as the fastest other one that could run, where they do not tie; None:
            they tie everywhere, or nothing was timed beside it.
        of_floor: the least time that the hardware allows over its time; None: it was not timed.
    """

    max_tokens: int | None
    backend: str
    reason: str
    evidence: tuple[str, ...] = ()
    ahead: Range | None = None
    of_floor: Range | None = None

    @property
    def why(self) -> str:
        """The reason, with figures where there are some."""
        return self.reason if self.ahead is None else f"{self.reason}, {times(self.ahead)} as fast as the next"


@dataclass(frozen=True)
class Loser:
    """A backend that runs for no token count.

    Attributes:
        backend: its name.
        reasons: all of them.
        refuses: it says itself that it cannot run here.
    """

    backend: str
    reasons: tuple[str, ...]
    refuses: bool = False


@dataclass(frozen=True)
class Choice:
    """What runs one part of a model.

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
        """The names that run, by rising token count, each once."""
        return tuple(dict.fromkeys(entry.backend for entry in self.entries))

    @property
    def proven(self) -> bool:
        """Whether every entry rests on evidence."""
        return all(entry.evidence for entry in self.entries)

    def backend_for(self, tokens: int) -> str:
        """The name of the backend that runs for that many tokens."""
        return next(e.backend for e in self.entries if e.max_tokens is None or tokens <= e.max_tokens)

    def winners(self) -> str:
        """One line: what runs for which token counts, and why."""
        return ", ".join(f"{entry.backend} {self._reach(entry)} ({entry.why})" for entry in self.entries)

    def describe(self) -> str:
        """One line: what runs for which token counts, what lost, and every reason."""
        losers = ", ".join(f"{loser.backend} ({'; '.join(loser.reasons)})" for loser in self.losers)
        return self.winners() + (f"; lost: {losers}" if losers else "")

    def _reach(self, entry: PlanEntry) -> str:
        if entry.max_tokens is not None:
            return f"for up to {entry.max_tokens} token{'s' if entry.max_tokens > 1 else ''}"
        return "above" if len(self.entries) > 1 else "for any token count"


Choose = Callable[[Role, Any], Choice]
"""Answers what runs a problem in a role; `Plan.choice` is one."""


@dataclass(frozen=True)
class Plan:
    """The choices of a model's parts, by role and problem.

    Attributes:
        choices: of every part; the problems are those of `moe` and `gemm`.
        remarks: what else its reader should know: a second layout and its price, a measurement that was noisy.
    """

    choices: Mapping[tuple[Role, Hashable], Choice] = field(default_factory=lambda: MappingProxyType({}))
    remarks: tuple[str, ...] = ()

    @property
    def proven(self) -> bool:
        """Whether every choice rests on evidence."""
        return all(choice.proven for choice in self.choices.values())

    def of(self, role: Role) -> tuple[Choice, ...]:
        """The choices of a role's parts, each once."""
        return tuple(dict.fromkeys(choice for (of, _), choice in self.choices.items() if of is role))

    def backends(self, role: Role) -> tuple[str, ...]:
        """Names of the backends that run in a role, each once."""
        return tuple(dict.fromkeys(name for choice in self.of(role) for name in choice.backends))

    def choice(self, role: Role, problem: Hashable) -> Choice:
        """What runs that problem.

        Raises:
            UnprovenError: the plan does not cover it.
        """
        if (role, problem) not in self.choices:
            raise UnprovenError(
                f"plan for {role}",
                found=f"nothing for {problem}",
                expected="an entry for every part of the checkpoint",
                hint="the checkpoint has changed since: run muster plan again",
            )
        return self.choices[role, problem]

    def describe(self) -> str:
        """One line for all: what runs in each role, what lost, and the first reason; `Choice.describe` has them all."""
        return "; ".join(f"{role}: {self._winners(role)}{self._losers(role)}" for role in Role if self.of(role))

    def _winners(self, role: Role) -> str:
        """Parts with the same winners for the same token counts share their words."""
        alike: dict[tuple[tuple[object, ...], ...], list[Choice]] = {}
        for choice in self.of(role):
            alike.setdefault(tuple((e.max_tokens, e.backend, e.reason) for e in choice.entries), []).append(choice)
        return ", elsewhere ".join(_together(choices).winners() for choices in alike.values())

    def _losers(self, role: Role) -> str:
        losers = {loser.backend: loser for choice in self.of(role) for loser in choice.losers}
        lost = [loser for name, loser in losers.items() if name not in self.backends(role)]
        reasons: dict[str, list[str]] = {}
        for loser in lost:
            if not loser.refuses:
                reasons.setdefault(loser.reasons[0], []).append(loser.backend)
        told = ", ".join(f"{' and '.join(names)} ({reason})" for reason, names in reasons.items())
        refusing = sum(loser.refuses for loser in lost)
        return (f", lost: {told}" if told else "") + (f", {refusing} cannot run here" if refusing else "")


def times(factors: Range) -> str:
    """Factors as people read them: `1.3-24x`."""
    low, high = (f"{factor:.1f}" if factor < 9.95 else f"{float(f'{factor:.2g}'):.0f}" for factor in factors)
    return f"{low}x" if low == high else f"{low}-{high}x"


def over(ranges: Iterable[Range | None]) -> Range | None:
    """The least and the most of several ranges; None when there are none."""
    known = [each for each in ranges if each is not None]
    return (min(low for low, _ in known), max(high for _, high in known)) if known else None


def _together(choices: Sequence[Choice]) -> Choice:
    """One for several whose entries differ in their figures alone."""
    entries = zip(*(choice.entries for choice in choices), strict=True)
    return replace(
        choices[0],
        entries=tuple(replace(same[0], ahead=over(entry.ahead for entry in same)) for same in entries),
    )


class _Facts(Protocol):
    @property
    def max_tokens(self) -> int | None: ...


class _Backend(Protocol):
    """What backends of expert layers and of linears share."""

    @property
    def facts(self) -> _Facts: ...

    def supports(self, problem: Any, device: Device) -> Decline | None: ...


def by_facts(
    registry: Registry[Any], problem: Hashable, device: Device, requested: str | None = None, *, kind: str
) -> Choice:
    """The choice by declared facts alone: backends meant for few tokens first, then the first for any count.

    Args:
        registry: of the backends to choose from; its order decides between equals.
        problem: what must be computed.
        device: where.
        requested: the backend the user named, None to choose. One meant for few tokens is completed above its bound.
        kind: what the backends compute, for messages.

    Raises:
        UsageError: an unknown name, a requested backend that cannot run, or none that can for every token count.
            All reasons are in it.
    """
    if requested is not None:
        registry.get(requested)
    able, losers = consider(registry, problem, device)
    if requested is not None and requested not in able:
        mine = [loser for loser in losers if loser.backend == requested]
        raise _refusal(f"{kind} backend {requested!r} cannot run here", mine, able)
    entries = _entries(able, requested)
    if not entries or entries[-1].max_tokens is not None:
        raise _refusal(f"no {kind} backend runs every token count here", losers, able)
    winners = dict.fromkeys(entry.backend for entry in entries)
    ahead = f"{requested} was asked for" if requested else f"behind {' and '.join(winners)} while nothing is measured"
    losers += [Loser(name, (ahead,)) for name in able if name not in winners]
    return Choice(entries, tuple(losers))


def consider(registry: Registry[Any], problem: Hashable, device: Device) -> tuple[dict[str, _Backend], list[Loser]]:
    """The backends that can run a problem, and those that cannot with their reasons; a broken plug-in is one."""
    able: dict[str, _Backend] = {}
    losers = []
    for name in registry.names():
        try:
            backend: _Backend = registry.get(name)
        except UsageError as error:
            losers.append(Loser(name, (" ".join(str(error).split()),), refuses=True))
            continue
        decline = backend.supports(problem, device)
        if decline is None:
            able[name] = backend
        else:
            losers.append(Loser(name, decline.reasons, refuses=True))
    return able, losers


def _refusal(thing: str, losers: list[Loser], able: Mapping[str, _Backend]) -> UsageError:
    reasons = [UsageError(f"{loser.backend}: {reason}") for loser in losers for reason in loser.reasons]
    return UsageError(thing, reasons=reasons, hint=f"can run: {', '.join(able) or 'none'}")


def _entries(able: Mapping[str, _Backend], requested: str | None) -> tuple[PlanEntry, ...]:
    bounded = [(b.facts.max_tokens, name) for name, b in able.items() if b.facts.max_tokens is not None]
    unbounded = [name for name, b in able.items() if b.facts.max_tokens is None]
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
