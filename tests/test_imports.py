"""Which room may import which: the table of docs/architecture.md, imports inside functions included."""

import ast
from pathlib import Path

import pytest

import muster

ROOT = Path(muster.__file__).parent

BASE = {"errors", "env"}
COMPUTE = {*BASE, "contract", "device", "formats", "native", "parallel", "plan", "workspace"}
RULES = {
    "errors": set(),
    "env": {"errors"},
    "workspace": set(),
    "contract": BASE,
    "device": BASE,
    "plan": {*BASE, "contract", "device"},
    "formats": BASE,
    "native": {*BASE, "contract", "formats"},
    "parallel": {*BASE, "device"},
    "checkpoint": {*BASE, "formats"},
    "gemm": COMPUTE,
    "attention": COMPUTE,
    "moe": COMPUTE,
    "model": {*COMPUTE, "attention", "checkpoint", "gemm", "moe"},
    "engine": {*COMPUTE, "attention", "checkpoint", "gemm", "model", "moe"},
}
RULES["lab"] = {"llm", "model", "engine", *RULES["engine"]}
RULES["llm"] = {"engine", "lab", *RULES["engine"]}
RULES["server"] = {"llm", "engine", "__init__", *RULES["engine"]}
RULES["console"] = {"llm", *RULES["llm"]}
RULES["cli"] = {"lab", "console", "server", "errors", "__init__"}
RULES["__init__"] = {"llm", "engine"}

OPTIONAL = ("numba", "llvmlite", "gguf", "xgrammar", "flashinfer", "deep_gemm", "vllm", "matplotlib", "httpx")
OF_THE_SERVER = ("fastapi", "starlette", "pydantic", "pydantic_core", "uvicorn", "prometheus_client")


def room(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(tree: ast.AST) -> list[tuple[str, int]]:
    names: list[tuple[str, int]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: imports are absolute"
            module = node.module or ""
            names += [(f"{module}.{alias.name}" if module == "muster" else module, node.lineno) for alias in node.names]
    return names


def sources() -> list[Path]:
    return sorted(ROOT.rglob("*.py"))


def test_every_room_has_a_rule() -> None:
    assert {room(path) for path in sources()} <= RULES.keys()


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_import_only_what_they_may(path: Path) -> None:
    allowed = {room(path), *RULES[room(path)]}
    for name, line in imported(ast.parse(path.read_text())):
        parts = name.split(".")
        if parts[0] != "muster":
            continue
        target = (
            parts[1]
            if len(parts) > 1 and ((ROOT / parts[1]).is_dir() or (ROOT / f"{parts[1]}.py").exists())
            else "__init__"
        )
        assert target in allowed, (
            f"{path.relative_to(ROOT)}:{line} imports {name}; {room(path)} may import {sorted(allowed)}"
        )


@pytest.mark.parametrize("library", OPTIONAL)
def test_an_optional_library_is_imported_in_one_file_only(library: str) -> None:
    files = [
        str(path.relative_to(ROOT))
        for path in sources()
        if any(name.split(".")[0] == library for name, _ in imported(ast.parse(path.read_text())))
    ]
    assert len(files) <= 1, f"{library} is imported in {files}"


@pytest.mark.parametrize("library", OPTIONAL)
def test_an_optional_library_is_imported_inside_a_function(library: str) -> None:
    for path in sources():
        top = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.Import | ast.ImportFrom)]
        names = [name for node in top for name, _ in imported(node)]
        assert not any(name.split(".")[0] == library for name in names), f"{path} imports {library} at module level"


@pytest.mark.parametrize("library", OF_THE_SERVER)
def test_a_library_of_the_server_is_imported_in_its_room_only(library: str) -> None:
    for path in sources():
        names = [name.split(".")[0] for name, _ in imported(ast.parse(path.read_text()))]
        assert library not in names or room(path) == "server", f"{path} imports {library}"


@pytest.mark.parametrize(
    "module", ["engine/scheduler.py", "engine/pages.py", "checkpoint/spec.py", "checkpoint/config.py"]
)
def test_planning_code_needs_no_torch(module: str) -> None:
    assert not any(name.split(".")[0] == "torch" for name, _ in imported(ast.parse((ROOT / module).read_text())))
