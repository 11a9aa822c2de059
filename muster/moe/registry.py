"""Expert-layer backends by name: ours from a table of module paths, other people's from `muster.backends`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from types import MappingProxyType
from typing import Any, TypeVar

from muster.contract import Registry
from muster.errors import UsageError
from muster.formats.rounding import Rounding
from muster.moe.backend import AnyBackend, Facts, FusedFunc, RowLayout, RunnerCore
from muster.moe.dispatch import DISPATCHERS

ENTRY_POINT_GROUP = "muster.backends"

MODULES: Mapping[str, str] = MappingProxyType(
    {
        "torch": "muster.moe.backends.torch",
        "cpu": "muster.moe.backends.cpu",
        "triton": "muster.moe.backends.triton",
        "triton_fused": "muster.moe.backends.triton_fused",
        "triton_w8a8": "muster.moe.backends.triton_w8a8",
        "decode": "muster.moe.backends.decode",
        "wgmma": "muster.moe.backends.wgmma",
        "wgmma_w8a8": "muster.moe.backends.wgmma_w8a8",
        "wgmma_w4a8": "muster.moe.backends.wgmma_w4a8",
    }
)

C = TypeVar("C", bound=RunnerCore[Any])
F = TypeVar("F", bound=FusedFunc[Any])

_FACT_TYPES: Mapping[str, type | tuple[type, ...]] = MappingProxyType(
    {
        "frozenset[str]": frozenset,
        "frozenset[ActivationName]": frozenset,
        "frozenset[Scoring] | None": (frozenset, type(None)),
        "tuple[Package, ...]": tuple,
        "tuple[str, ...]": tuple,
        "Rounding": Rounding,
        "str": str,
        "bool": bool,
        "int": int,
        "int | None": (int, type(None)),
    }
)


@cache
def backends() -> Registry[AnyBackend]:
    """Every expert-layer backend; nothing is imported until a backend is asked for."""
    return Registry("expert-layer", MODULES, ENTRY_POINT_GROUP)


def register_runner_core(name: str) -> Callable[[type[C]], type[C]]:
    """Class decorator: registers a `RunnerCore` under `name`.

    Raises:
        UsageError: the name is taken, or the class lacks a method or declares facts of the wrong kind.
    """

    def decorate(core: type[C]) -> type[C]:
        _refuse(name, [*_class_problems(core, RunnerCore), *_layout_problems(core)])
        backends().register(name, lambda _: None)(core)
        return core

    return decorate


def register_fused_func(name: str, dispatcher: str = "standard") -> Callable[[type[F]], type[F]]:
    """Class decorator: registers a `FusedFunc` under `name`; it does the work of that token dispatcher itself.

    Raises:
        UsageError: the name is taken, no such dispatcher, or the class lacks a method or declares facts of the
            wrong kind.
    """

    def decorate(fused: type[F]) -> type[F]:
        problems = _class_problems(fused, FusedFunc)
        if dispatcher not in DISPATCHERS:
            problems.append(
                UsageError("dispatcher", found=repr(dispatcher), expected=f"one of {', '.join(DISPATCHERS)}")
            )
        _refuse(name, problems)
        fused.dispatcher = dispatcher
        backends().register(name, lambda _: None)(fused)
        return fused

    return decorate


def _refuse(name: str, problems: list[UsageError]) -> None:
    error = UsageError.gather(f"expert-layer backend {name!r}", problems, hint="see docs/adding-a-backend.md")
    if error is not None:
        raise error


def _class_problems(backend: type, kind: type) -> list[UsageError]:
    where = f"{backend.__module__}.{backend.__qualname__}"
    if not issubclass(backend, kind):
        return [UsageError(where, found=f"bases {_names(backend.__bases__)}", expected=f"a {kind.__name__}")]
    missing = sorted(getattr(backend, "__abstractmethods__", ()))
    problems = [UsageError(f"{where}.{method}", found="no such method", expected="its own") for method in missing]
    facts = getattr(backend, "facts", None)
    if not isinstance(facts, Facts):
        return [*problems, UsageError(f"{where}.facts", found=repr(facts), expected="Facts(...)")]
    return problems + [
        UsageError(f"{where}.facts.{field.name}", found=repr(getattr(facts, field.name)), expected=str(field.type))
        for field in fields(Facts)
        if not _is_a(getattr(facts, field.name), str(field.type))
    ]


def _is_a(value: object, annotation: str) -> bool:
    expected = _FACT_TYPES[annotation]
    return isinstance(value, expected) and (expected is bool or not isinstance(value, bool))


def _layout_problems(core: type) -> list[UsageError]:
    where = f"{core.__module__}.{core.__qualname__}"
    problems = []
    layouts = getattr(core, "layouts", None)
    if not (isinstance(layouts, frozenset) and layouts and all(isinstance(entry, RowLayout) for entry in layouts)):
        problems.append(UsageError(f"{where}.layouts", found=repr(layouts), expected="a frozenset of RowLayout"))
    row_block = getattr(core, "row_block", None)
    if not (isinstance(row_block, int) and row_block >= 1):
        problems.append(UsageError(f"{where}.row_block", found=repr(row_block), expected="a whole number from 1"))
    return problems


def _names(classes: tuple[type, ...]) -> str:
    return ", ".join(c.__name__ for c in classes)
