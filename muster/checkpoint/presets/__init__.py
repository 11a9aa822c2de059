"""Released checkpoints by name, as data: config values, how each release is stored, where it is published.

Each TOML file is one family: `common` config keys, what each of its `models` adds, quantisation `schemes`, and the
`releases`: a model, a scheme, and what the config does not say of the files (`layout`, as `storage.Layout`).
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from typing import Any

from muster.checkpoint.config import interpret
from muster.checkpoint.spec import ModelSpec
from muster.checkpoint.storage import Layout
from muster.errors import UsageError


@dataclass(frozen=True)
class Preset:
    """One released checkpoint.

    Attributes:
        name: what users type.
        repository: where it is published.
        config: its config.json, structure-bearing keys only.
        spec: what that says.
        layout: what the config does not say of the files.
        notes: what a reader should know, one line each.
    """

    name: str
    repository: str
    config: Mapping[str, object]
    spec: ModelSpec
    layout: Layout
    notes: tuple[str, ...]


def names() -> tuple[str, ...]:
    """All names, in order."""
    return tuple(sorted(_releases()))


@cache
def preset(name: str) -> Preset:
    """A released checkpoint.

    Raises:
        UsageError: no such name; the hint lists those like it.
    """
    found = _releases().get(name)
    if found is None:
        raise UsageError(
            f"preset {name}", found="no such name", expected="a released checkpoint", hint=suggestion(name)
        )
    family, release = found
    config = _merged(family["common"], family["models"][release["model"]])
    if "scheme" in release:
        config["quantization_config"] = family["schemes"][release["scheme"]]
    reading = interpret(config, where=f"preset {name}")
    return Preset(
        name=name,
        repository=release["repository"],
        config=config,
        spec=reading.spec,
        layout=_layout(reading.spec, release.get("layout", {})),
        notes=(f"published as {release['repository']}", *release.get("notes", ()), *reading.notes),
    )


def suggestion(name: str) -> str:
    """A hint with the names most like one that does not exist."""
    known = names()
    wanted = name.lower().rpartition("/")[2]
    like = difflib.get_close_matches(wanted, known, n=5, cutoff=0.5)
    like += [one for one in known if len(wanted) > 2 and wanted in one and one not in like][:5]
    return f"did you mean {', '.join(like)}?" if like else f"the names are {', '.join(known)}"


@cache
def _releases() -> Mapping[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Family and release by name."""
    releases: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {}
    for file in sorted(resources.files(__name__).iterdir(), key=lambda entry: entry.name):
        if file.name.endswith(".toml"):
            family = tomllib.loads(file.read_text(encoding="utf-8"))
            for name, release in family["releases"].items():
                assert name not in releases, f"{name} twice"
                releases[name] = family, release
    return releases


def _merged(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Two configs as one; objects in both are merged, else the second counts."""
    merged = dict(one)
    for key, value in other.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _merged(merged[key], value) if both else value
    return merged


def _layout(spec: ModelSpec, stated: Mapping[str, Any]) -> Layout:
    usual = Layout.usual(spec)
    dtypes = (*stated.get("dtypes", {}).items(), *usual.dtypes)
    return replace(usual, **{key: value for key, value in stated.items() if key != "dtypes"}, dtypes=dtypes)
