"""Backends for dense linears by name: ours from a table of module paths, other people's from `muster.linears`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import TypeVar

from muster.contract import Registry
from muster.errors import UsageError
from muster.gemm.backend import AnyLinear, LinearBackend, LinearFacts

ENTRY_POINT_GROUP = "muster.linears"

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "cpu": "muster.gemm.backends.cpu",
        "triton": "muster.gemm.backends.triton",
        "torch": "muster.gemm.backends.torch",
    }
)
"""In order of preference: within its `max_tokens` a backend goes before the ones after it."""

L = TypeVar("L", bound=AnyLinear)


@cache
def linears() -> Registry[AnyLinear]:
    """Every backend for dense linears; nothing is imported until a backend is asked for."""
    return Registry("linear", MODULES, ENTRY_POINT_GROUP)


def register_linear(name: str) -> Callable[[type[L]], type[L]]:
    """Class decorator: registers a `LinearBackend` under `name`.

    Raises:
        UsageError: the name is taken, or the class lacks a method or its facts.
    """

    def decorate(backend: type[L]) -> type[L]:
        _refuse_incomplete(name, backend)
        linears().register(name, lambda _: None)(backend)
        return backend

    return decorate


def _refuse_incomplete(name: str, backend: type) -> None:
    where = f"{backend.__module__}.{backend.__qualname__}"
    problems = [
        UsageError(f"{where}.{method}", found="no such method", expected="its own")
        for method in sorted(getattr(backend, "__abstractmethods__", ()))
    ]
    if not issubclass(backend, LinearBackend):
        problems.append(UsageError(where, found="another kind of class", expected="a LinearBackend"))
    if not isinstance(getattr(backend, "facts", None), LinearFacts):
        problems.append(UsageError(f"{where}.facts", found="none", expected="LinearFacts(...)"))
    error = UsageError.gather(f"linear backend {name!r}", problems)
    if error is not None:
        raise error
