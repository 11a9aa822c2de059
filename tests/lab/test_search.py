"""The search for tile sizes, on Triton's interpreter: it times what it should, and survives what cannot be launched."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, sys
from dataclasses import asdict
import torch
from muster.formats.spec import NVFP4
from muster.lab.measure import search
from muster.lab.prove.cases import Case, Part, Role
from muster.moe.kernels.triton_tiles import Tile, Tiles
from muster.moe.problem import MoEProblem, RoutingRule

search.last_level_cache = lambda _: 0
search.SECONDS = 0.0
layer = MoEProblem(128, 128, 2, RoutingRule(1), 2, weights=NVFP4)
case = Case(Part(Role.EXPERTS, layer, "drawn", 1), 2, "uniform", 0)
good = Tiles(16, 1, Tile(32, 64, 4, 4), Tile(64, 64, 4, 4))
slow = Tiles(16, 1, Tile(16, 64, 4, 4), Tile(16, 64, 4, 4))
broken = Tiles(17, 1, Tile(16, 64, 4, 4), Tile(32, 64, 4, 4))
search.candidates = lambda *_: (good, slow, broken)
search.crossed = lambda best, *_: (best,)
with torch.inference_mode():
    found = search.Bench.of(case, "triton_fused", torch.device("cpu")).search()
print(json.dumps(asdict(found)))
"""


def test_the_fastest_wins_and_what_cannot_be_launched_is_told() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["tried"] == 2
    assert len(found["failed"]) == 1
    assert found["failed"][0].startswith("Tiles(rows=17")
    # Fewer, wider tiles are fewer programs, and the interpreter runs one after the other.
    assert found["tiles"]["first"]["columns"] == 32
    assert found["sample"]["median"] <= found["default"]["median"]
