"""What every kind of backend shares: declines with all their reasons, and a registry of lazily loaded names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

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


def in_order(devices: Iterable[str]) -> str:
    """Device keys for a reader: compute capabilities by number, other keys after them."""
    return ", ".join(sorted(devices, key=lambda key: (len(key.partition(".")[0]), key)))


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


RUNNER_CORE, FUSED_FUNC, DISPATCHER, LINEAR = "runner core", "fused function", "token dispatcher", "linear"
"""Kinds of backend."""


class Declared(Protocol):
    """Declared facts, of expert layers or of linears."""

    @property
    def devices(self) -> frozenset[str]: ...
    @property
    def weights(self) -> frozenset[str]: ...
    def decline(self, problem: Any, device: Any, /) -> Decline | None: ...


F = TypeVar("F", bound=Declared)

NO_ADAPTER = "no adapter yet"

LIBRARIES: Mapping[str, tuple[Package, ...]] = MappingProxyType(
    {
        "aiter": (Package("amd-aiter"),),
        "cudnn": (Package("flashinfer-python", ">=0.6.11"), Package("nvidia-cudnn-frontend", ">=1.13")),
        "cute-dsl": (Package("flashinfer-python", ">=0.6.11"), Package("nvidia-cutlass-dsl", ">=4.5")),
        "deep-gemm": (Package("deep-gemm"),),
        "flashinfer": (Package("flashinfer-python", ">=0.6.11"),),
        "torch": (),
        "trtllm-gen": (Package("flashinfer-python", ">=0.6.11,!=0.6.16.*,!=0.6.17.*"), Package("flashinfer-cubin")),
        "vllm": (Package("vllm", ">=0.25,<0.26"),),
    }
)
"""What must be installed for kernels that are known and not adapted, by the library that has them."""

COMPILER = "nvcc and ninja, or the flashinfer-jit-cache wheel of the same version"
"""What FlashInfer's kernels that are compiled at first use need beside it."""


@dataclass(frozen=True)
class Trap:
    """What makes a backend give wrong numbers, fail, or not run at all although it was asked for.

    Attributes:
        what: one sentence.
        source: where it was seen.
    """

    what: str
    source: str


@dataclass(frozen=True)
class Known(Generic[F]):
    """A backend of somebody else's that nobody has adapted: what is known of it. It cannot be run.

    Attributes:
        name: what users of the engines that have it call it.
        kind: what it is.
        library: who has it, and the version that was read.
        paths: its kernels, each an exact product of devices and formats with what that kernel asks for.
        needs: what it needs that is no package.
        traps: what to look for before trusting it.
        draft_ban: why it must not compute draft layers; empty: it may.
        dispatchers: the ways of moving tokens that it works with.
    """

    name: str
    kind: str
    library: str
    paths: tuple[F, ...]
    needs: tuple[str, ...] = ()
    traps: tuple[Trap, ...] = ()
    draft_ban: str = ""
    dispatchers: tuple[str, ...] = ("standard",)

    def path(self, problem: Any, device: Any) -> F | None:
        """The first of its kernels that could; None when none could."""
        return next((path for path in self.paths if path.decline(problem, device) is None), None)

    def obstacles(self, problem: Any, device: Any, *, draft: bool = False) -> tuple[str, ...]:
        """Every reason against it besides the missing adapter; empty when its facts allow it."""
        banned = (self.draft_ban,) if draft and self.draft_ban else ()
        if self.path(problem, device) is not None:
            return banned
        reading = [path for path in self.paths if problem.weights.family in path.weights]
        if not reading:
            return (*banned, *self._unread(problem, device))
        declines = [path.decline(problem, device) for path in reading]
        return tuple(
            dict.fromkeys((*banned, *(reason for decline in declines if decline for reason in decline.reasons)))
        )

    def supports(self, problem: Any, device: Any, *, draft: bool = False) -> Decline:
        """Always a decline: it says at least that there is no adapter."""
        return Decline((*self.obstacles(problem, device, draft=draft), NO_ADAPTER))

    def _unread(self, problem: Any, device: Any) -> tuple[str, ...]:
        """Against weights that none of its kernels reads: which those read, and on what any of them runs."""
        devices = frozenset[str]().union(*(path.devices for path in self.paths))
        weights = frozenset[str]().union(*(path.weights for path in self.paths))
        unread = f"reads {', '.join(sorted(weights))} weights, these are {problem.weights.name}"
        elsewhere = f"runs on {in_order(devices)}, this is {device.key}"
        return (unread,) if device.key in devices else (elsewhere, unread)
