"""Without a GPU kernels run in Triton's interpreter, in processes of their own: importing Triton chooses it."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

FILES = ("moe/test_triton_route.py", "moe/test_triton_sort.py", "gemm/test_triton.py")
pytestmark = pytest.mark.skipif(
    torch.cuda.is_available() or find_spec("triton") is None, reason="the kernels run on the GPU, or there is no Triton"
)


@pytest.mark.parametrize("file", FILES)
def test_kernels_pass_in_the_interpreter(file: str) -> None:
    environ = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-x", str(Path(__file__).parent / file)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout
