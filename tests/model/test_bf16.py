"""What a GPU computes, as far as it can be seen without one: models in bf16, on Triton's interpreter."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("family", "format", "backend"),
    [("qwen3_moe", "bf16", "triton_fused"), ("mixtral", "bf16", "triton"), ("mixtral", "nvfp4", "triton_fused")],
)
def test_logits_in_bf16_are_those_in_float32(family, format, backend, tmp_path) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-m", "tests.model.bf16_interpreted", family, format, backend, str(tmp_path)]
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert found["cache"] == ["torch.bfloat16"]
    # A wrong weight or scale is off by 1 and more, three layers of bf16 by a few hundredths.
    assert all(1e-4 < error < 0.06 for error in found["errors"]), found
