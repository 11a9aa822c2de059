"""Backends for dense linears of other engines and libraries, as far as they are known without an adapter.

Read in SGLang 0.5.15, vLLM 0.25.1 and FlashInfer 0.6.13; nothing here was executed. Whoever writes an adapter takes
its name out of this table and declares the adapter's own facts, which are then checked.
"""

from __future__ import annotations

from typing import Any

from muster.contract import COMPILER, LIBRARIES, LINEAR, Known, Package, Trap
from muster.device import AMPERE, BLACKWELL, BLACKWELL_RTX, CDNA, COMPUTE_CAPABILITIES, HOPPER, THOR
from muster.formats.rounding import EXACT, Grid, Rounding
from muster.gemm.backend import LinearFacts

SGLANG, VLLM, FLASHINFER = "SGLang 0.5.15", "vLLM 0.25.1", "FlashInfer 0.6.13"

CUDA = frozenset(COMPUTE_CAPABILITIES)
FP8_CUDA = CUDA - AMPERE
FP4_CUDA = BLACKWELL | THOR | BLACKWELL_RTX

A16 = EXACT
A8_TENSOR = Rounding(input=Grid.FP8_TENSOR)
A8_TOKEN = Rounding(input=Grid.FP8_TOKEN)
A8_GROUP = Rounding(input=Grid.FP8_GROUP)
A8_MX = Rounding(input=Grid.MXFP8)
A4 = Rounding(input=Grid.NVFP4)


def _path(
    devices: frozenset[str],
    weights: str,
    rounding: Rounding,
    packages: str,
    align: tuple[int, int] = (1, 1),
    traits: str = "",
    dtypes: str = "bf16 f16",
) -> LinearFacts:
    """One kernel: lists are words in a string, `traits` names the facts that hold, `align` is that of N and K."""
    return LinearFacts(
        devices=devices,
        weights=frozenset(weights.split()),
        dtypes=frozenset(dtypes.split()),
        rounding=rounding,
        packages=LIBRARIES.get(packages, (Package(packages),)),
        rows_multiple=align[0],
        columns_multiple=align[1],
        **dict.fromkeys(traits.split(), True),  # type: ignore[arg-type]
    )


def _known(name: str, library: str, *paths: LinearFacts, **more: Any) -> Known[LinearFacts]:
    return Known(name, LINEAR, library, paths, **more)


BACKENDS: tuple[Known[LinearFacts], ...] = (
    _known(
        "cublas",
        f"{SGLANG}, {VLLM} (torch); cuBLAS through torch",
        _path(CUDA, "bf16 f16 f32", A16, "torch", traits="bias", dtypes="bf16 f16 f32"),
        _path(FP8_CUDA, "fp8-tensor", A8_TENSOR, "torch", (16, 16), "bias"),
        _path(HOPPER | BLACKWELL, "fp8-channel", A8_TOKEN, "torch", (16, 16), "bias"),
        traps=(Trap("Which algorithm runs, and so the last bits, depends on the number of tokens.", VLLM),),
    ),
    _known(
        "cutedsl",
        f"{SGLANG}; FlashInfer's TGV kernel",
        _path(BLACKWELL, "bf16", A16, "cute-dsl", traits="bias", dtypes="bf16"),
    ),
    _known(
        "deep_gemm",
        f"{SGLANG}, {VLLM}; DeepGEMM",
        _path(HOPPER | BLACKWELL, "fp8-block", A8_GROUP, "deep-gemm", (64, 128), dtypes="bf16"),
        needs=("nvcc: each token bucket is compiled at its first use",),
        traps=(
            Trap("Its gate excludes 12.0 by number, so 12.1 passes without kernels.", SGLANG),
            Trap("On 10.x scales must be powers of two; others are quantised again at load.", SGLANG),
            Trap("Shapes it cannot take run Triton, after the weights were decoded again where needed.", SGLANG),
        ),
    ),
    _known(
        "flashinfer_deepgemm",
        f"{SGLANG}; {FLASHINFER}",
        _path(HOPPER, "fp8-block", A8_GROUP, "flashinfer", (64, 128), dtypes="bf16"),
        needs=(COMPILER,),
        traps=(Trap("Shapes it cannot take run Triton without a word.", SGLANG),),
    ),
    _known(
        "flashinfer_cutlass",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, CUTLASS",
        _path(FP4_CUDA, "nvfp4", A4, "flashinfer", (32, 32)),
        _path(BLACKWELL | BLACKWELL_RTX, "fp8-block", A8_GROUP, "flashinfer", (128, 128), dtypes="bf16"),
        needs=(COMPILER,),
        traps=(
            Trap("Its grouped FP8 form refuses more than one group on 12.x, for wrong results there.", FLASHINFER),
            Trap("Rows and columns are padded to multiples of 32, which costs memory.", SGLANG),
        ),
    ),
    _known(
        "flashinfer_cudnn",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, cuDNN",
        _path(FP4_CUDA, "nvfp4", A4, "cudnn", (32, 32)),
        needs=("best with CUDA 13 and cuDNN 9.15",),
    ),
    _known(
        "flashinfer_cutedsl",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, CuTe DSL",
        _path(BLACKWELL, "nvfp4", A4, "cute-dsl", (32, 32)),
    ),
    _known(
        "flashinfer_trtllm",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, trtllm-gen",
        _path(BLACKWELL, "nvfp4", A4, "trtllm-gen", (128, 64), dtypes="bf16"),
        _path(BLACKWELL, "fp8-block", A8_GROUP, "trtllm-gen", (128, 128), dtypes="bf16"),
        traps=(
            Trap("Its layout serves no other backend: after the load the choice is final.", SGLANG),
            Trap("In FP8 shapes that it cannot take run Triton without a word.", SGLANG),
        ),
    ),
    _known(
        "flashinfer_b12x",
        f"{VLLM}; {FLASHINFER}, CuTe DSL",
        _path(BLACKWELL_RTX, "nvfp4", A4, "cute-dsl", (32, 32)),
        needs=("CUDA 13",),
        traps=(Trap("One of the engines has no way to ask for it.", SGLANG),),
    ),
    _known(
        "cutlass",
        f"{SGLANG}, {VLLM}, each with kernels of its own",
        _path(FP4_CUDA, "nvfp4", A4, "vllm", (32, 32)),
        _path(HOPPER | FP4_CUDA, "fp8-block", A8_GROUP, "vllm", (128, 128)),
        _path(FP8_CUDA, "fp8-tensor", A8_TENSOR, "vllm", (16, 16), "bias"),
        _path(FP8_CUDA, "fp8-channel", A8_TOKEN, "vllm", (16, 16), "bias"),
        traps=(Trap("FP8 shapes that it cannot take run Triton without a word.", SGLANG),),
    ),
    _known(
        "marlin",
        f"{SGLANG}, {VLLM}",
        _path(CUDA, "int4 nvfp4 mxfp4 fp8-tensor fp8-channel fp8-block", A16, "vllm", (64, 16), "act_order bias"),
        traps=(
            Trap("A W4A4 checkpoint runs W4A16 on it, so its numbers are not those of Blackwell.", VLLM),
            Trap("Below 8.9 FP8 weights always take it.", SGLANG),
        ),
    ),
    _known(
        "humming",
        f"{VLLM}; Humming",
        _path(CUDA, "int4 nvfp4 mxfp4 fp8-tensor fp8-channel fp8-block", A16, "humming-kernels", (64, 64)),
    ),
    _known("machete", VLLM, _path(HOPPER, "int4", A16, "vllm", (128, 64), "act_order")),
    _known("exllama", VLLM, _path(CUDA, "int4", A16, "vllm", (32, 32), "act_order", dtypes="f16")),
    _known("conch", f"{VLLM}; Conch", _path(CUDA | CDNA, "int4", A16, "conch-triton-kernels", (1, 32))),
    _known("fbgemm", f"{VLLM}; FBGEMM", _path(FP4_CUDA, "nvfp4", A4, "fbgemm-gpu-genai", (32, 32))),
    _known(
        "aiter",
        f"{SGLANG}, {VLLM}; AITER",
        _path(CDNA, "fp8-tensor fp8-channel", A8_TOKEN, "aiter"),
        _path(CDNA, "fp8-block", A8_GROUP, "aiter", (128, 128)),
        needs=("an environment switch of its engine",),
        traps=(Trap("Some shapes give NaN and are listed as exceptions.", SGLANG),),
    ),
    _known(
        "emulation",
        VLLM,
        _path(CUDA | CDNA, "nvfp4", A4, "vllm"),
        _path(CUDA | CDNA, "mxfp4", A8_MX, "vllm"),
        traps=(Trap("It decodes all weights in every call: for comparisons, not for speed.", VLLM),),
    ),
)
