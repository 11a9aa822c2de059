"""What of a checkpoint a command is about: parts, backends and token counts, from its options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from muster.checkpoint.loader import Loader
from muster.device import Device, here
from muster.errors import UsageError
from muster.lab.explain.offers import known
from muster.lab.prove.cases import BUCKETS, Case, Part, Role, cases, parts
from muster.lab.prove.contender import Contender, contenders, registry_of

Agenda = Mapping[Part, Mapping[int, Sequence[Case]]]
"""The cases to prove, by part and token bucket."""


@dataclass(frozen=True)
class Selection:
    """Parts of a checkpoint and the backends that could compute them here.

    Attributes:
        directory: the checkpoint, absolute.
        device: where it would run.
        parts: those of the roles asked for, in the checkpoint's order.
        tokens: token buckets, rising.
        names: the backends that the user asked for; None: all.
    """

    directory: Path
    device: Device
    parts: tuple[Part, ...]
    tokens: tuple[int, ...]
    names: frozenset[str] | None = None

    @classmethod
    def of(
        cls,
        model: Path,
        *,
        backends: Sequence[str] = (),
        role: str | None = None,
        tokens: str | None = None,
        problems: Iterable[UsageError] = (),
    ) -> Selection:
        """Reads the options, then the checkpoint's config and headers.

        Args:
            model: the checkpoint.
            backends: names from the user; none: all.
            role: the only role; None: all.
            tokens: token counts with commas between them; None: those that suit the device.
            problems: what is wrong with the command's other options, to be told in the same breath.

        Raises:
            UsageError: every option that cannot be used.
            InputError: a config or a checkpoint that cannot be read.
        """
        problems = list(problems)
        problems += [*_unknown(backends), *_unknown_role(role)]
        buckets = _buckets(tokens, problems) if tokens is not None else None
        error = UsageError.only_or_all("options", problems)
        if error is not None:
            raise error
        device = here()
        directory = model.absolute()
        found = parts(Loader.open(directory, draft=True), device)
        default = BUCKETS["cpu" if device.key == "cpu" else "cuda"]
        return cls(directory, device, _of_role(found, role, directory), buckets or default)._narrowed(backends)

    def only(self, backend: str, role: Role) -> Selection:
        """The parts of one role, and one backend for them.

        Raises:
            UsageError: no such backend, or one of another kind; the checkpoint has no such parts.
        """
        error = UsageError.only_or_all("options", _unknown((backend,)))
        if error is not None:
            raise error
        return replace(self, parts=_of_role(self.parts, role, self.directory))._narrowed((backend,))

    def _narrowed(self, backends: Sequence[str]) -> Selection:
        """The parts that one of these backends is for; with none, all."""
        names = frozenset(backends)
        if not names:
            return self
        parts = tuple(part for part in self.parts if names & set(registry_of(part.role).names()))
        if not parts:
            kinds = ", ".join(dict.fromkeys(part.role.value for part in self.parts))
            raise UsageError("--backend", found=", ".join(sorted(names)), expected=f"a backend for {kinds}")
        return replace(self, parts=parts, names=names)

    def contenders(self) -> tuple[Contender, ...]:
        """Every backend asked for on every part of its kind."""
        return tuple(each for part in self.parts for each in contenders(part, self.device, self.names))

    def agenda(self, *, quick: bool = False, seed: int = 0) -> Agenda:
        """The cases of every part, on the checkpoint's own weights."""
        return {
            part: {tokens: cases(part, (tokens,), self.directory, quick=quick, seeds=(seed,)) for tokens in self.tokens}
            for part in self.parts
        }


def _unknown(backends: Sequence[str]) -> list[UsageError]:
    if not backends:
        return []
    here = sorted({name for role in Role for name in registry_of(role).names()})
    elsewhere = {entry.name for role in Role for entry in known(role)}
    return [
        UsageError(
            "--backend",
            found=f"{name!r}{', which has no adapter yet' if name in elsewhere else ''}",
            expected=f"one of {', '.join(here)}",
        )
        for name in dict.fromkeys(backends)
        if name not in here
    ]


def _unknown_role(role: str | None) -> list[UsageError]:
    if role is None or role in set(Role):
        return []
    return [UsageError("--role", found=repr(role), expected=f"one of {', '.join(Role)}")]


def _buckets(text: str, problems: list[UsageError]) -> tuple[int, ...]:
    words = [word.strip() for word in text.split(",")]
    wrong = [word for word in words if not (word.isascii() and word.isdecimal() and int(word) > 0)]
    expected = "whole numbers from 1 with commas between them, such as 1,8,64"
    problems += [UsageError("--tokens", found=repr(word), expected=expected) for word in wrong]
    return () if wrong else tuple(sorted({int(word) for word in words}))


def _of_role(found: tuple[Part, ...], role: str | None, directory: Path) -> tuple[Part, ...]:
    chosen = tuple(part for part in found if role is None or part.role == role)
    if not chosen:
        roles = ", ".join(dict.fromkeys(part.role.value for part in found))
        raise UsageError("--role", found=repr(role), expected=f"what {directory} has: {roles}")
    return chosen
