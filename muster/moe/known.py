"""Expert-layer backends of other engines and libraries, as far as they are known without an adapter.

Read in SGLang 0.5.15, vLLM 0.25.1 and FlashInfer 0.6.13; nothing here was executed. Whoever writes an adapter takes
its name out of this table and declares the adapter's own facts, which are then checked. What to beware of is in
`muster.moe.traps`.
"""

from __future__ import annotations

from typing import Any

from muster.contract import COMPILER, DISPATCHER, FUSED_FUNC, LIBRARIES, RUNNER_CORE, Known, Package
from muster.device import ADA, BLACKWELL, BLACKWELL_RTX, CDNA, COMPUTE_CAPABILITIES, HOPPER, THOR
from muster.formats.rounding import EXACT, Grid, Rounding
from muster.formats.spec import FORMATS
from muster.moe.backend import Facts
from muster.moe.problem import Scoring
from muster.moe.traps import TRAPS

SGLANG, VLLM, FLASHINFER = "SGLang 0.5.15", "vLLM 0.25.1", "FlashInfer 0.6.13"

CUDA = frozenset(COMPUTE_CAPABILITIES)
FP4_CUDA = BLACKWELL | THOR | BLACKWELL_RTX

A16 = EXACT
A8_TENSOR = Rounding(input=Grid.FP8_TENSOR, inner=Grid.FP8_TENSOR)
A8_TOKEN = Rounding(input=Grid.FP8_TOKEN, inner=Grid.FP8_TOKEN)
A8_GROUP = Rounding(input=Grid.FP8_GROUP, inner=Grid.FP8_GROUP)
A8_MX = Rounding(input=Grid.MXFP8, inner=Grid.MXFP8)
A4 = Rounding(input=Grid.NVFP4, inner=Grid.NVFP4)
"""What the inputs of the two products are rounded to; what 16-bit results lie in between is for an adapter to say."""

ALL, GATED = "silu gelu relu2 swiglu-oai", "silu gelu swiglu-oai"
GPT_OSS = "silu swiglu-oai"


def _path(
    devices: frozenset[str],
    weights: str,
    activations: str,
    rounding: Rounding,
    packages: str,
    traits: str = "",
    align: tuple[int, int] = (1, 1),
    dtypes: str = "bf16",
    **more: Any,
) -> Facts:
    """One kernel: lists are words in a string, `traits` names the facts that hold, `align` is that of D and F."""
    return Facts(
        devices=devices,
        weights=frozenset(weights.split()),
        activations=frozenset(activations.split()),  # type: ignore[arg-type]
        rounding=rounding,
        packages=LIBRARIES.get(packages, (Package(packages),)),
        dtypes=frozenset(dtypes.split()),
        hidden_multiple=align[0],
        inner_multiple=align[1],
        **dict.fromkeys(traits.split(), True),  # type: ignore[arg-type]
        **more,
    )


def _known(kind: str, name: str, library: str, *paths: Facts, **more: Any) -> Known[Facts]:
    return Known(name, kind, library, paths, traps=TRAPS.get(name, ()), **more)


HALF = "bf16 f16"
IDS = "sentinel_ids"
LOGITS: frozenset[Scoring] = frozenset({"softmax", "sigmoid"})

_TRTLLM_ROUTED = (
    _path(BLACKWELL, "bf16", "silu relu2", A16, "trtllm-gen", IDS, (1, 128)),
    _path(BLACKWELL, "fp8-block", "silu", A8_GROUP, "trtllm-gen", IDS, (128, 128)),
    _path(BLACKWELL, "nvfp4", "silu gelu relu2", A4, "trtllm-gen", "clamp sentinel_ids", (128, 128)),
    _path(BLACKWELL, "mxfp4", GPT_OSS, A8_MX, "trtllm-gen", "bias clamp sentinel_ids", (32, 32)),
)
_TRTLLM = (
    _path(BLACKWELL, "bf16", "silu relu2", A16, "trtllm-gen", "renormalised sentinel_ids", (1, 128), scorings=LOGITS),
    _path(BLACKWELL, "fp8-tensor", "silu relu2", A8_TENSOR, "trtllm-gen", IDS, (1, 16), scorings=LOGITS),
    _path(BLACKWELL, "fp8-block", "silu", A8_GROUP, "trtllm-gen", IDS, (128, 128), scorings=LOGITS),
    _path(BLACKWELL, "nvfp4", "silu gelu relu2", A4, "trtllm-gen", "clamp sentinel_ids", (128, 128), scorings=LOGITS),
    _path(BLACKWELL, "mxfp4", GPT_OSS, A8_MX, "trtllm-gen", "bias clamp sentinel_ids", (32, 32), scorings=LOGITS),
    _path(BLACKWELL, "int4", "silu", A16, "trtllm-gen", "clamp sentinel_ids", (128, 128), scorings=LOGITS),
)

BACKENDS: tuple[Known[Facts], ...] = (
    _known(
        RUNNER_CORE,
        "triton_kernel",
        f"{SGLANG}, {VLLM}; Triton's triton_kernels",
        _path(
            HOPPER | BLACKWELL,
            "bf16 mxfp4",
            GATED,
            A16,
            "triton_kernels",
            "bias clamp router_weight_on_input",
            scorings=frozenset({"softmax"}),
        ),
    ),
    _known(
        RUNNER_CORE,
        "triton_unfused",
        f"{VLLM}; Triton's triton_kernels",
        _path(HOPPER | BLACKWELL, "mxfp4", GATED, A16, "triton_kernels", "bias clamp"),
        draft_ban="taken out of its own engine's lists for a fault with MTP",
    ),
    _known(
        RUNNER_CORE,
        "deep_gemm",
        f"{SGLANG}, {VLLM}; DeepGEMM",
        _path(HOPPER | BLACKWELL, "fp8-block", "silu", A8_GROUP, "deep-gemm", IDS, (128, 128)),
        _path(HOPPER | BLACKWELL, "bf16", "silu", A16, "deep-gemm", IDS, (64, 64)),
        _path(BLACKWELL, "mxfp4", "silu", A8_GROUP, "deep-gemm", IDS, (128, 128)),
        needs=("nvcc: each token bucket is compiled at its first use",),
        dispatchers=("standard", "deepep", "mooncake", "nixl"),
    ),
    _known(
        FUSED_FUNC,
        "deep_gemm_mega_moe",
        f"{VLLM}, {SGLANG} (megamoe); DeepGEMM",
        _path(BLACKWELL, "mxfp4", "silu", A8_GROUP, "deep-gemm", "clamp sentinel_ids", (128, 128)),
        dispatchers=("megamoe",),
    ),
    _known(FUSED_FUNC, "flashinfer_trtllm", f"{SGLANG}, {VLLM}; {FLASHINFER}, trtllm-gen", *_TRTLLM),
    _known(
        FUSED_FUNC,
        "flashinfer_trtllm_routed",
        f"{SGLANG}; {FLASHINFER}, trtllm-gen",
        *_TRTLLM_ROUTED,
        dispatchers=("standard", "flashinfer"),
    ),
    _known(
        FUSED_FUNC,
        "experimental_sgl_trtllm",
        f"{SGLANG}, a copy of flashinfer_trtllm for LoRA research",
        *_TRTLLM,
        needs=("an environment switch of its engine",),
    ),
    _known(
        FUSED_FUNC,
        "flashinfer_cutlass",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, CUTLASS",
        _path(ADA | HOPPER | FP4_CUDA, "bf16 f16", ALL, A16, "flashinfer", "bias sentinel_ids", dtypes=HALF),
        _path(ADA | HOPPER | FP4_CUDA, "fp8-tensor", ALL, A8_TENSOR, "flashinfer", "bias sentinel_ids", (1, 16), HALF),
        _path(HOPPER, "fp8-block", ALL, A8_GROUP, "flashinfer", IDS, (128, 128)),
        _path(HOPPER, "mxfp4", GPT_OSS, A16, "flashinfer", "bias clamp sentinel_ids", (128, 128)),
        _path(BLACKWELL | BLACKWELL_RTX, "mxfp4", GPT_OSS, A8_MX, "flashinfer", "bias clamp sentinel_ids", (128, 128)),
        _path(FP4_CUDA, "nvfp4", ALL, A4, "flashinfer", "bias sentinel_ids", (32, 32), HALF),
        _path(ADA | HOPPER, "int4", "silu", A8_TENSOR, "flashinfer", IDS, (128, 128)),
        needs=(COMPILER, "CUDA 12.8 for fp8-block on 9.0"),
        dispatchers=("standard", "flashinfer"),
    ),
    _known(
        FUSED_FUNC,
        "flashinfer_mxfp4",
        f"{SGLANG}; {FLASHINFER}, CUTLASS on 9.0 and trtllm-gen on 10.x",
        _path(HOPPER, "mxfp4", GPT_OSS, A16, "flashinfer", "bias clamp sentinel_ids", (128, 128)),
        _path(BLACKWELL, "mxfp4", GPT_OSS, A8_MX, "trtllm-gen", "bias clamp sentinel_ids", (32, 32)),
        needs=(COMPILER,),
    ),
    _known(
        FUSED_FUNC,
        "flashinfer_cutedsl",
        f"{SGLANG}, {VLLM}; {FLASHINFER}, CuTe DSL",
        _path(BLACKWELL, "nvfp4", "silu", A4, "cute-dsl", IDS, (128, 128)),
        dispatchers=("standard", "flashinfer", "deepep"),
    ),
    _known(
        FUSED_FUNC,
        "flashinfer_b12x",
        f"{VLLM}; {FLASHINFER}, CuTe DSL",
        _path(BLACKWELL_RTX, "nvfp4", "silu relu2", A4, "cute-dsl", align=(32, 32)),
        needs=("CUDA 13",),
    ),
    _known(
        FUSED_FUNC,
        "cutlass",
        f"{SGLANG}, {VLLM}, each with kernels of its own",
        _path(FP4_CUDA, "nvfp4", "silu", A4, "vllm", "router_weight_on_input", (32, 32), HALF),
        _path(HOPPER | BLACKWELL | BLACKWELL_RTX, "fp8-block", "silu", A8_GROUP, "sgl-kernel", align=(128, 128)),
        _path(HOPPER | BLACKWELL, "fp8-tensor", "silu gelu", A8_TENSOR, "vllm", IDS, (16, 16), HALF),
        _path(HOPPER | BLACKWELL, "fp8-channel", "silu gelu", A8_TOKEN, "vllm", IDS, (16, 16), HALF),
        _path(HOPPER, "int4", "silu", A8_TOKEN, "vllm", IDS, (128, 128)),
    ),
    _known(
        FUSED_FUNC,
        "marlin",
        f"{SGLANG}, {VLLM}",
        _path(
            CUDA,
            "int4 nvfp4 mxfp4 fp8-tensor fp8-channel fp8-block",
            "silu relu2 swiglu-oai",
            A16,
            "vllm",
            "act_order bias clamp router_weight_on_input sentinel_ids",
            (128, 64),
            HALF,
        ),
    ),
    _known(
        RUNNER_CORE,
        "humming",
        f"{VLLM}; Humming",
        _path(
            CUDA,
            "int4 nvfp4 mxfp4 fp8-tensor fp8-channel fp8-block",
            GATED,
            A16,
            "humming-kernels",
            IDS,
            (64, 64),
            HALF,
        ),
    ),
    _known(
        FUSED_FUNC,
        "hpc",
        f"{VLLM}; HPC",
        _path(HOPPER | BLACKWELL, "fp8-tensor fp8-block", "silu", A8_GROUP, "hpc", align=(128, 128)),
    ),
    _known(
        RUNNER_CORE,
        "aiter",
        f"{SGLANG}, {VLLM}; AITER",
        _path(CDNA, "bf16", "silu gelu", A16, "aiter", IDS, (1, 128)),
        _path(CDNA, "fp8-tensor fp8-channel", "silu gelu", A8_TOKEN, "aiter", IDS),
        _path(CDNA, "fp8-block", "silu gelu", A8_GROUP, "aiter", IDS, (128, 128)),
        _path(frozenset({"gfx950"}), "mxfp4", GPT_OSS, A16, "aiter", "bias clamp sentinel_ids", (32, 32)),
        needs=("an environment switch of its engine",),
        dispatchers=("standard", "deepep", "mooncake", "nixl", "mori"),
    ),
    _known(
        RUNNER_CORE,
        "flydsl",
        f"{VLLM}; FlyDSL",
        _path(CDNA, "bf16 fp8-block mxfp4", "silu", A16, "flydsl", align=(1, 128)),
    ),
    _known(
        RUNNER_CORE,
        "emulation",
        VLLM,
        _path(CUDA | CDNA, "nvfp4", ALL, A4, "vllm", IDS, dtypes=HALF),
        _path(CUDA | CDNA, "mxfp4", ALL, A8_MX, "vllm", IDS, dtypes=HALF),
    ),
)


def _dispatcher(
    name: str, library: str, package: str, devices: frozenset[str], max_tokens: int | None = None
) -> Known[Facts]:
    weights = " ".join({entry.family for entry in FORMATS.values()})
    rows = _path(devices, weights, ALL, A16, package, IDS, dtypes=HALF, max_tokens=max_tokens)
    return _known(DISPATCHER, name, library, rows, dispatchers=(name,))


DISPATCHERS: tuple[Known[Facts], ...] = (
    _dispatcher("deepep", f"{SGLANG}, {VLLM}; DeepEP", "deep-ep", HOPPER | BLACKWELL, max_tokens=1024),
    _dispatcher("mooncake", f"{SGLANG}; Mooncake", "mooncake-transfer-engine", CUDA),
    _dispatcher("nixl", f"{SGLANG}, {VLLM}; NIXL", "nixl", CUDA),
    _dispatcher("flashinfer", f"{SGLANG}, {VLLM}; {FLASHINFER}", "flashinfer", HOPPER | BLACKWELL),
    _dispatcher("mori", f"{SGLANG}, {VLLM}; MoRI", "mori", CDNA),
)
"""Ways of moving tokens between ranks: they compute nothing, so any format will do."""
