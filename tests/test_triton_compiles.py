"""Every tile of the linears, the router and the rows compile for each GPU they are declared for; no GPU is needed."""

import os
import re
import subprocess
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1", reason="needs Triton's compiler"
)
SHARED_MEMORY = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024, 120: 99 * 1024}
"""What a program may have, in bytes (CUDA programming guide, technical specifications per compute capability)."""
PARKED = 40
"""Bytes of a thread's stack in a linear: ahead of its loop Triton 3.7's assembler parks a few values."""
PARKS_NONE = "3.9."
"""The beginning of the version of a Triton whose assembler does not."""
targets = pytest.mark.parametrize("capability", SHARED_MEMORY)


def compiled(kernel, signature: dict[str, str], constants: dict[str, object], capability: int, warps: int, stages: int):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names) if types[name].startswith("*")}
    source = ASTSource(fn=kernel, signature=types, constexprs=constants, attrs=aligned)
    options = {"num_warps": warps, "num_stages": stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def stack(kernel, path: Path) -> int:
    """Bytes of a thread's stack."""
    import triton.backends.nvidia

    path.write_bytes(kernel.asm["cubin"])
    tool = Path(triton.backends.nvidia.__file__).parent / "bin" / "cuobjdump"
    usage = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=True).stdout
    return int(re.findall(r"STACK:(\d+)", usage)[-1])


def check(kernel, tmp_path: Path, capability: int, parked: int = 0) -> None:
    """Fits into shared memory, and its threads keep what they have in registers, but for so many bytes."""
    assert kernel.metadata.shared <= SHARED_MEMORY[capability]
    assert stack(kernel, tmp_path / "kernel.cubin") <= parked, "registers are spilled"


@targets
@pytest.mark.parametrize("tokens", [16, 64, 512])
@pytest.mark.parametrize("kind", ["plain", "fp8-block", "e4m3"])
def test_linear(kind, tokens, capability, tmp_path) -> None:
    from muster.gemm.kernels import triton_linear

    sizes = triton_linear.tile(kind, tokens, 128)
    constants = {
        "K": 4096,
        "KIND": triton_linear._KINDS[kind],
        "GROUP": {"e4m3": 16, "fp8-block": 128}.get(kind, 1),
        "FACTOR": kind == "e4m3",
        "BIAS": True,
        "SHARES": 4 if tokens <= 64 else 1,
        "BLOCK_N": sizes.rows,
        "BLOCK_T": sizes.tokens,
        "BLOCK_K": sizes.depth,
        "BF16": True,
    }
    signature = {
        **dict.fromkeys(("x_TK", "out_TN"), "*bf16"),
        **dict.fromkeys(("factor_N", "bias_N", "partial"), "*fp32"),
        **dict.fromkeys(("tokens", "rows"), "i32"),
        "codes": "*bf16" if kind == "plain" else "*u8",
        "scales": "*fp32" if kind == "fp8-block" else "*u8",
        "turns": "*i32",
    }
    kernel = compiled(triton_linear._linear, signature, constants, capability, sizes.warps, sizes.stages)
    check(kernel, tmp_path, capability, 0 if version("triton").startswith(PARKS_NONE) else PARKED)


@targets
def test_router(capability, tmp_path) -> None:
    from muster.moe.kernels import triton_route

    constants = {
        "EXPERTS": 256,
        "BLOCK": 256,
        "TOP_K": 8,
        "BLOCK_K": 8,
        "SCORING": 1,
        "SOFTMAX_AFTER": False,
        "BIAS": True,
        "GROUPS": 8,
        "KEPT": 4,
        "RENORMALISE": True,
    }
    signature = dict.fromkeys(("logits_TE", "bias_E", "weights_TK"), "*fp32") | {"ids_TK": "*i64"}
    signature |= dict.fromkeys(("scaling_factor", "epsilon"), "fp32")
    check(compiled(triton_route._route, signature, constants, capability, 1, 3), tmp_path, capability)


@targets
@pytest.mark.parametrize("masked", [False, True], ids=["padded", "masked"])
def test_rows(masked, capability, tmp_path) -> None:
    from muster.moe.kernels import triton_sort

    pointers = {"ids_TK": "*i64", "rank_TK": "*i32", "counts_L": "*i64", "starts_L": "*i64", "row_TK": "*i64"}
    values = {"x_TD": "*bf16", "weights_TK": "*fp32", "x_RD": "*bf16", "y_RD": "*bf16", "out_TD": "*bf16"}
    numbers = dict.fromkeys(("slots", "width", "first_expert", "room"), "i32")
    kernels = {
        triton_sort._place: {"BLOCK": 2048},
        triton_sort._copy: {
            "TOP_K": 8,
            "EXPERTS": 128,
            "BLOCK_L": 128,
            "ROW_BLOCK": 64,
            "MASKED": False,
            "WEIGHTED": True,
            "BLOCK": 1024,
        },
        triton_sort._combine: {"TOP_K": 8, "WEIGHTED": True, "BLOCK": 1024},
    }
    for kernel, constants in kernels.items():
        check(compiled(kernel, pointers | values | numbers, constants, capability, 4, 3), tmp_path, capability)
