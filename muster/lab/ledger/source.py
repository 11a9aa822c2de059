"""The source that a backend or the judge is made of, as one hash; modules are found by reading imports, not by running.

Only what computes is followed: a new row in a registry or a reworded error does not touch anybody's numbers.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import entry_points
from pathlib import Path

from muster.errors import UsageError
from muster.gemm import registry as linear_registry
from muster.moe import registry as expert_registry

_FILE = re.compile(r"\w+\.\w+")
_ROOT = Path(__file__).parents[2]
_ROOMS = frozenset({"attention", "formats", "gemm", "lab", "moe", "native", "parallel", "workspace"})
_NOT_COMPUTING = frozenset({"muster.gemm.registry", "muster.moe.registry", "muster.lab.ledger.evidence"})
_BINDING = ("muster.moe.experts", "muster.moe.dispatchers.standard")
"""Between an expert backend and the tokens it is judged by."""
_JUDGE = ("muster.lab.prove.cases", "muster.lab.prove.tolerance", "muster.moe.reference")


def of_backend(role: str, backend: str) -> str:
    """sha256 over a backend's module (all files of its package, for an outside one) and the modules it computes with.

    Raises:
        UsageError: no such backend, or its package has no files.
    """
    module = _module(role, backend)
    binding = () if role == "linears" else _BINDING
    if module.split(".")[0] == "muster":
        return _hash(_closure((module, *binding)))
    package = _package_files(backend, module.split(".")[0])
    imports = {name for path in package.values() if path.suffix == ".py" for name in _imports(path.read_bytes())}
    return _hash({**package, **_closure((*imports, *binding))})


def judge() -> str:
    """sha256 over what decides a verdict: the cases, the references, the limits."""
    return _hash(_closure(_JUDGE))


def _module(role: str, backend: str) -> str:
    """The module that registers a backend: from our table, an entry point, or where a registered class says it is."""
    registry = linear_registry if role == "linears" else expert_registry
    ours: str | None = registry.MODULES.get(backend)
    if ours is not None:
        return ours
    for point in entry_points(group=registry.ENTRY_POINT_GROUP, name=backend):
        return point.module
    known = linear_registry.linears() if role == "linears" else expert_registry.backends()
    return type(known.get(backend)).__module__


def _closure(modules: Iterable[str]) -> dict[str, Path]:
    """Files of our computing modules among `modules` and what they import, by their path under the package."""
    files: dict[str, Path] = {}
    waiting = [above for module in modules for above in _and_above(module)]
    while waiting:
        module = waiting.pop()
        path = _file(module) if _followed(module) else None
        if path is not None and (key := path.relative_to(_ROOT).as_posix()) not in files:
            files[key] = path
            files |= {(path.parent / name).relative_to(_ROOT).as_posix(): path.parent / name for name in _named(path)}
            waiting += _imports(path.read_bytes())
    return files


def _followed(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "muster" and len(parts) > 1 and parts[1] in _ROOMS and module not in _NOT_COMPUTING


def _file(module: str) -> Path | None:
    """The file of one of our modules; None when the name is not a module but something inside one."""
    path = _ROOT.joinpath(*module.split(".")[1:])
    candidates = (path.with_suffix(".py"), path / "__init__.py")
    return next((candidate for candidate in candidates if candidate.exists()), None)


@cache
def _imports(content: bytes) -> tuple[str, ...]:
    """Every dotted name that a file's content imports anywhere, and the packages above each."""
    names: list[str] = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return tuple(dict.fromkeys(above for name in names for above in _and_above(name)))


def _named(path: Path) -> Iterator[str]:
    """Names of files that lie beside a module and that it speaks of, such as the source of a kernel in CUDA."""
    words = (node.value for node in ast.walk(ast.parse(path.read_bytes())) if isinstance(node, ast.Constant))
    names = {word for word in words if isinstance(word, str) and _FILE.fullmatch(word)}
    return (name for name in sorted(names) if (path.parent / name).is_file())


def _and_above(name: str) -> Iterator[str]:
    """A dotted name after the packages above it, whose code runs when it is imported."""
    parts = name.split(".")
    return (".".join(parts[:length]) for length in range(1, len(parts) + 1))


def _package_files(backend: str, package: str) -> dict[str, Path]:
    """All files of an outside package, compiled ones too, by their path; its code is not run."""
    spec = importlib.util.find_spec(package)
    places = [Path(place) for place in spec.submodule_search_locations or ()] if spec else []
    files = {
        f"{package}/{path.relative_to(place).as_posix()}": path
        for place in places
        for path in sorted(place.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    if spec and spec.origin and not places and Path(spec.origin).is_file():
        files = {Path(spec.origin).name: Path(spec.origin)}
    if not files:
        raise UsageError(
            f"backend {backend!r}",
            found=f"no files of its package {package!r} on {sys.path}",
            expected="an installed package",
            hint="install it again",
        )
    return files


def _hash(files: dict[str, Path]) -> str:
    digest = hashlib.sha256()
    for name in sorted(files):
        content = files[name].read_bytes()
        digest.update(f"{len(name)} {name} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()
