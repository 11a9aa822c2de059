"""Evidence stops counting when what made it changes: the machine, a library, the judge, the backend's own source."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import muster
from muster import device
from muster.errors import UsageError
from muster.lab.ledger.environment import NOTED, _driver_of_proc, current, differences, source_hash

ROOT = Path(muster.__file__).parent
BACKENDS = [("experts", "cpu"), ("experts", "torch"), ("draft", "cpu"), ("linears", "cpu"), ("linears", "torch")]


def python(program: str, *path: Path, arguments: tuple[str, ...] = (), **environment: str) -> str:
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(map(str, (*path, ROOT.parent))),
        "OMP_NUM_THREADS": "1",
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_environment_names_the_device_the_libraries_and_the_judge():
    found = current(device.cpu(), "experts", "cpu")
    assert all(isinstance(text, str) and text for text in found.values())
    assert found["key"] == "cpu"
    assert found["torch"] == torch.__version__
    assert {"device", "instructions", "threads", "judge"} <= found.keys()
    assert found.keys() >= NOTED


def test_only_the_packages_that_a_backend_declares_matter_to_it():
    assert "package llvmlite" in current(device.cpu(), "experts", "cpu")
    assert "package llvmlite" in current(device.cpu(), "linears", "cpu")
    assert not any(name.startswith("package") for name in current(device.cpu(), "experts", "torch"))


def test_threads_are_those_that_muster_computes_with(monkeypatch):
    monkeypatch.setenv("MUSTER_THREADS", "7")
    now = current(device.cpu(), "experts", "torch")
    monkeypatch.setenv("MUSTER_THREADS", "3")
    assert differences(now, current(device.cpu(), "experts", "torch")) == ("threads 7 then, 3 now",)


def test_differences_are_named_and_what_is_only_noted_is_none():
    then = {"device": "A", "driver": "570.1", "package triton": "3.5", "python": "3.11", "muster": "0.1", "system": "x"}
    assert differences(then, then) == ()
    assert differences(then, {**then, "python": "3.12", "muster": "0.2", "system": "y"}) == ()
    assert differences(then, {**then, "driver": "580.2"}) == ("driver 570.1 then, 580.2 now",)
    gone = {name: text for name, text in then.items() if name != "package triton"}
    assert differences(then, gone) == ("triton 3.5 then, none now",)
    assert differences(gone, then) == ("triton none then, 3.5 now",)


def test_another_device_is_one_reason_and_not_a_list_of_all_that_follows_from_it():
    then = {"device": "A", "key": "9.0", "driver": "570.1"}
    assert differences(then, {"device": "B", "key": "cpu", "threads": "2"}) == ("device A then, B now",)
    assert differences(then, {"device": "A", "key": "9.1", "driver": "580.2"}) == ("key 9.0 then, 9.1 now",)


@pytest.mark.parametrize(
    ("line", "driver"),
    [
        ("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5 22:23:56 UTC 2024", "550.54.15"),
        ("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build  (dvs)", "570.124.06"),
        ("something else", "unknown"),
    ],
)
def test_driver_is_read_from_both_forms_of_the_kernel_modules_file(tmp_path, line, driver):
    (tmp_path / "version").write_text(f"{line}\nGCC version:  gcc 12.3.0\n")
    assert _driver_of_proc(tmp_path / "version") == driver
    assert _driver_of_proc(tmp_path / "nowhere") == "unknown"


@pytest.mark.parametrize("backend", ["nobody", ""])
@pytest.mark.parametrize("role", ["experts", "linears"])
def test_a_backend_that_is_not_there_has_no_source(role, backend):
    with pytest.raises(UsageError):
        source_hash(role, backend)


def test_source_hashes_are_the_same_in_every_process():
    program = (
        f"from muster.lab.ledger.environment import source_hash\nfor pair in {BACKENDS}: print(source_hash(*pair))"
    )
    here = [source_hash(*pair) for pair in BACKENDS]
    assert python(program, PYTHONHASHSEED="1").split() == here
    assert here[0] == here[2]
    assert len(set(here)) == 4


@pytest.mark.parametrize(("role", "module"), [("experts", "moe.backends.cpu"), ("linears", "gemm.backends.cpu")])
def test_everything_that_a_backend_really_imports_and_computes_with_is_hashed(role, module):
    program = f"""
import sys
import muster.{module}
from muster.native import jit, rows, team
loaded = set(sys.modules)
from muster.lab.ledger import source
files = source._closure(("muster.{module}", *(source._BINDING if {role!r} == "experts" else ())))
for name in sorted(loaded):
    if source._followed(name):
        path = source._file(name)
        assert path.relative_to(source._ROOT).as_posix() in files, name
        print(name)
"""
    names = python(program).split()
    assert f"muster.{module}" in names
    assert "muster.native.jit" in names


@pytest.fixture
def site(tmp_path):
    """An outside package with a backend that must not run to be hashed: importing it fails."""
    package = tmp_path / "site" / "muster_away"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('executed')\n")
    (package / "core.py").write_text("from muster.native import rows\n")
    (package / "kernel.so").write_bytes(b"\x7fELF code")
    info = package.parent / "muster_away-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: muster-away\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[muster.backends]\naway = muster_away.core\n")
    return package


EDITS = """
import sys
from pathlib import Path
from muster.lab.ledger import source

assert source._ROOT == Path(sys.argv[1]), "edits go to a copy"

def hashes():
    pairs = [(role, name) for role in ("experts", "linears") for name in ("cpu", "torch")] + [("experts", "away")]
    return {**{f"{role} {name}": source.of_backend(role, name) for role, name in pairs}, "judge": source.judge()}

before = hashes()
for file in sys.argv[2:]:
    path = source._ROOT / file
    text = path.read_bytes()
    path.write_bytes(text + b"# edited")
    print(f"{file}: {', '.join(name for name, value in hashes().items() if value != before[name])}")
    path.write_bytes(text)
assert hashes() == before
"""


def test_an_edit_touches_exactly_those_who_compute_with_it(tmp_path, site):
    shutil.copytree(ROOT, tmp_path / "muster", ignore=shutil.ignore_patterns("__pycache__"))
    everyone = "experts cpu, experts torch, linears cpu, linears torch, experts away, judge"
    expected = {
        "moe/backends/cpu.py": "experts cpu",
        "moe/backends/torch.py": "experts torch",
        "moe/kernels/cpu.py": "experts cpu",
        "moe/dispatchers/standard.py": "experts cpu, experts torch, experts away",
        "gemm/backends/torch.py": "linears torch",
        "native/rows.py": "experts cpu, linears cpu, experts away",
        "formats/codec.py": everyone,
        "lab/prove/tolerance.py": "judge",
        "lab/prove/cases.py": "judge",
        "moe/reference.py": "judge",
        "moe/registry.py": "",
        "gemm/registry.py": "",
        "errors.py": "",
        "lab/ledger/ledger.py": "",
        "engine/scheduler.py": "",
    }
    output = python(EDITS, tmp_path, site.parent, arguments=(str(tmp_path / "muster"), *expected))
    assert dict(line.split(": ", 1) for line in output.splitlines()) == expected


def test_every_file_of_an_outside_package_counts_and_none_is_run(site):
    program = f"""
from pathlib import Path
from muster import device
from muster.lab.ledger import source
from muster.lab.ledger.environment import current

assert current(device.cpu(), "experts", "away")["key"] == "cpu"
before = source.of_backend("experts", "away")
for name in ("__init__.py", "core.py", "kernel.so"):
    path = Path({str(site)!r}) / name
    path.write_bytes(path.read_bytes() + b" ")
    after = source.of_backend("experts", "away")
    assert after != before, name
    before = after
(Path({str(site)!r}) / "__pycache__").mkdir(exist_ok=True)
(Path({str(site)!r}) / "__pycache__" / "core.pyc").write_bytes(b"compiled")
assert source.of_backend("experts", "away") == before
"""
    python(program, site.parent)


def test_an_outside_package_that_is_gone_is_a_named_error(site):
    shutil.rmtree(site)
    program = """
from muster.errors import UsageError
from muster.lab.ledger import source
try:
    source.of_backend("experts", "away")
except UsageError as error:
    print(error)
"""
    assert "muster_away" in python(program, site.parent)
