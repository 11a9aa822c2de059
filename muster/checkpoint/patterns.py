"""Module patterns of quantisation configs: exact names, parents, bare names, globs, `re:`, fused parts, prefixes."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable, Iterator

from muster.errors import ConfigError

_PREFIXES = ("model.language_model.", "language_model.model.", "language_model.", "model.")

_FUSED: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("qkv_proj", ("q_proj", "k_proj", "v_proj")),
    ("gate_up_proj", ("gate_proj", "up_proj")),
    ("w13", ("w1", "w3")),
    ("in_proj_qkvz", ("in_proj_qkv", "in_proj_z")),
    ("in_proj_ba", ("in_proj_b", "in_proj_a")),
    ("fused_qkv_a_proj_with_mqa", ("q_a_proj", "kv_a_proj_with_mqa")),
)
_MANGLED = (("indexer.weights_proj", "indexers_proj"),)
"""GLM's exception lists spell the indexer's `weights_proj` this way."""


def plain_name(name: str) -> str:
    """A module name (or the literal head of a pattern) without the prefix of its wrapper."""
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            return name[len(prefix) :]
    return name


class Patterns:
    """A list of module patterns, compiled once."""

    def __init__(self, patterns: Iterable[str], source: str) -> None:
        """Compiles.

        Raises:
            ConfigError: a `re:` pattern that is no regular expression; all of them at once.
        """
        self._names: dict[str, str] = {}
        self._heads: dict[str, str] = {}
        self._expressions: list[tuple[re.Pattern[str], str]] = []
        problems = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                try:
                    self._expressions.append((re.compile(pattern.removeprefix("re:")), pattern))
                except (re.error, RecursionError, OverflowError) as error:
                    thing = f"{source}: {pattern}"
                    problems.append(ConfigError(thing, found=str(error), expected="a regular expression"))
                continue
            name = plain_name(pattern)
            if not any(character in name for character in "*?["):
                self._names.setdefault(name, pattern)
            elif not any(character in name[:-1] for character in "*?["):
                self._heads.setdefault(name[:-1], pattern)
            else:
                self._expressions.append((re.compile(fnmatch.translate(name)), pattern))
        self._longest = max(map(len, self._heads), default=0)
        combined = ConfigError.gather(source, problems)
        if combined is not None:
            raise combined

    def find(self, module: str) -> str | None:
        """The pattern that covers a module: by its name, its parents, its fused form or pieces; None if none does."""
        for name in _spellings(module):
            bare = plain_name(name)
            found = self._by_name(bare) or self._by_head(bare) or self._by_expression(name, bare)
            if found is not None:
                return found
        return None

    def mentions(self, module: str) -> str | None:
        """A pattern that stands anywhere in the module's name, the loosest reading (old modelopt, AWQ)."""
        return next((pattern for name, pattern in self._names.items() if name in module), None)

    def _by_name(self, bare: str) -> str | None:
        """A pattern without wildcards covers a module when its dotted parts stand in the module's, in order."""
        if not self._names:
            return None
        parts = bare.split(".")
        for first in range(len(parts)):
            for last in range(len(parts), first, -1):
                found = self._names.get(".".join(parts[first:last]))
                if found is not None:
                    return found
        return None

    def _by_head(self, bare: str) -> str | None:
        for end in range(min(len(bare), self._longest) + 1):
            found = self._heads.get(bare[:end])
            if found is not None:
                return found
        return None

    def _by_expression(self, name: str, bare: str) -> str | None:
        if not self._expressions:
            return None
        forms = dict.fromkeys((name, bare, *(prefix + bare for prefix in _PREFIXES)))
        candidates = [*forms, *_parents(bare)]
        for expression, pattern in self._expressions:
            whole = pattern.startswith("re:")
            if any(expression.match(form) for form in (forms if whole else candidates)):
                return pattern
        return None


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _spellings(module: str) -> Iterator[str]:
    """The module's name, then the names that fused or split implementations give the same weights."""
    yield module
    parent, _, last = module.rpartition(".")
    dot = "." if parent else ""
    for fused, pieces in _FUSED:
        if last in pieces:
            yield f"{parent}{dot}{fused}"
        elif last == fused:
            yield from (f"{parent}{dot}{piece}" for piece in pieces)
    for name, mangled in _MANGLED:
        if module.endswith(name):
            yield module.removesuffix(name) + mangled
