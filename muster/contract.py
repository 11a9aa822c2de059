"""What every kind of backend shares: declines with all their reasons, and a registry of lazily loaded names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from typing import Generic, TypeVar

from packaging.specifiers import SpecifierSet

from muster.errors import MusterError, UsageError

T = TypeVar("T")


@dataclass(frozen=True)
class Decline:
    """The answer "I cannot", with every reason; a backend that can answers None instead."""

    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(self.reasons)

    @staticmethod
    def when(checks: Mapping[str, bool]) -> Decline | None:
        """The reasons whose check is true, together; None when there are none."""
        reasons = tuple(reason for reason, holds in checks.items() if holds)
        return Decline(reasons) if reasons else None


class Registry(Generic[T]):
    """Backends by name: our own from a table of module paths, other people's from an entry-point group.

    A module is imported when its backend is first asked for; importing it must register that name.
    """

    def __init__(self, kind: str, modules: Mapping[str, str], group: str | None = None) -> None:
        self._kind = kind
        self._modules = dict(modules)
        self._group = group
        self._backends: dict[str, T] = {}

    def register(self, name: str, check: Callable[[T], None]) -> Callable[[type[T]], type[T]]:
        """A class decorator: makes one instance, lets `check` refuse it, and keeps it under `name`.

        Raises:
            UsageError: the name is already taken.
        """

        def decorate(backend: type[T]) -> type[T]:
            if name in self._backends:
                raise UsageError(
                    f"{self._kind} backend {name!r}",
                    found=f"{backend.__module__}.{backend.__qualname__} registers it a second time",
                    expected="one registration per name",
                    hint=f"it belongs to {type(self._backends[name]).__module__}; choose another name",
                )
            instance = backend()
            check(instance)
            self._backends[name] = instance
            return backend

        return decorate

    def names(self) -> tuple[str, ...]:
        """Every known name, our own first, without importing any backend.

        Raises:
            UsageError: an installed package takes a name that another one has.
        """
        names = dict.fromkeys((*self._modules, *self._backends))
        names.update(dict.fromkeys(point.name for point in self._entry_points()))
        return tuple(names)

    def get(self, name: str) -> T:
        """The backend of that name, its module imported now if it was not yet.

        Raises:
            UsageError: no such name, or its module does not register it.
        """
        if name not in self._backends:
            self._load(name)
        if name not in self._backends:
            raise UsageError(f"{self._kind} backend", found=repr(name), expected=f"one of {', '.join(self.names())}")
        return self._backends[name]

    def __iter__(self) -> Iterator[tuple[str, T]]:
        return ((name, self.get(name)) for name in self.names())

    def _load(self, name: str) -> None:
        if name in self._modules:
            importlib.import_module(self._modules[name])
            return
        for point in self._entry_points():
            if point.name == name:
                try:
                    point.load()
                except MusterError:
                    raise
                except Exception as error:
                    raise UsageError(
                        f"{self._kind} backend {name!r} from {point.value}",
                        found=f"{type(error).__name__}: {error}",
                        expected="a module that imports and registers it",
                    ) from error

    def _entry_points(self) -> tuple[EntryPoint, ...]:
        """Other people's backends; a name that two would have stops the program, since no choice between them is safe.

        Raises:
            UsageError: every name that is taken twice, and by whom.
        """
        points = () if self._group is None else tuple(entry_points(group=self._group))
        owners: dict[str, list[str]] = {name: [module] for name, module in self._modules.items()}
        for point in points:
            owners.setdefault(point.name, []).append(_described(point))
        clashes = [
            UsageError(f"{self._kind} backend {name!r}", found=" and ".join(claims), expected="one owner")
            for name, claims in owners.items()
            if len(claims) > 1
        ]
        error = UsageError.gather("installed backends", clashes, hint="uninstall one of each, or have it renamed")
        if error is not None:
            raise error
        return points


def _described(point: EntryPoint) -> str:
    return f"{point.value} of {point.dist.name} {point.dist.version}" if point.dist is not None else point.value


@dataclass(frozen=True)
class Package:
    """A distribution a backend needs, with the versions that work (a PEP 440 specifier, empty: any)."""

    name: str
    versions: str = ""


def missing_packages(packages: tuple[Package, ...]) -> tuple[str, ...]:
    """A reason for each package that is not installed or has another version; imports none of them."""
    reasons = []
    for package in packages:
        wanted = f"{package.name}{package.versions}"
        try:
            found = version(package.name)
        except PackageNotFoundError:
            reasons.append(f"needs {wanted}, which is not installed")
            continue
        if not SpecifierSet(package.versions).contains(found, prereleases=True):
            reasons.append(f"needs {wanted}, found {found}")
    return tuple(reasons)
