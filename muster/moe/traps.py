"""What to beware of in other people's expert-layer backends, by name; each was read, or reported by somebody."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from muster.contract import Trap

_SGLANG = "SGLang 0.5.15"
_VLLM = "vLLM 0.25.1"
_FLASHINFER = "FlashInfer 0.6.13"

_CLAMP = Trap("An activation limit is dropped without a word.", _SGLANG)
_DRAFT = Trap("Its engine gives draft layers that are not quantised to Triton without a word.", _SGLANG)
_TRTLLM = (
    Trap("Nothing refuses 9.0 or 12.x, where the kernels do not exist.", f"{_SGLANG}, {_FLASHINFER}"),
    Trap("A tile of 192 columns gave NaN in FlashInfer 0.6.16 and 0.6.17.", "FlashInfer issue 4486"),
    Trap("NVFP4 gave wrong answers on B200 where it routes by itself.", "vLLM issue 52308, open"),
    Trap("Shared experts may no longer be fused into the routed ones.", _SGLANG),
)

TRAPS: Mapping[str, tuple[Trap, ...]] = MappingProxyType(
    {
        "triton_kernel": (
            Trap("It crashes on Blackwell with a driver from 595 on.", _SGLANG),
            Trap("Its router ignores a selection bias and expert groups.", _SGLANG),
            Trap("On several expert-parallel ranks it stops with an error that says nothing.", _SGLANG),
        ),
        "triton_unfused": (Trap("Only an explicit request reaches it.", _VLLM),),
        "deep_gemm": (
            Trap("Its gate excludes 12.0 by number, so 12.1 passes without kernels.", _SGLANG),
            Trap("On 10.x scales must be powers of two; others are quantised again at load or stop it.", _SGLANG),
            Trap("One engine lists 12.x for it, the library has kernels for 9.0 and 10.x only.", _VLLM),
            Trap("Unquantised layers of an FP8 checkpoint run Triton instead.", _SGLANG),
            Trap("An activation limit other than 10 fails an assertion.", _SGLANG),
        ),
        "deep_gemm_mega_moe": (
            Trap("It moves the tokens itself, past the dispatcher that was made for the layer.", _SGLANG),
        ),
        "flashinfer_trtllm": (
            *_TRTLLM,
            Trap("FP8 takes a routing rule without a name, and plain softmax too, for DeepSeek-V3's.", _SGLANG),
            Trap("In FP8 an activation limit is dropped without a word.", _SGLANG),
            Trap("In bf16 the lack of renormalisation fails an assertion in the first forward pass.", _SGLANG),
            Trap("With routing that it does not know, Triton runs on FP8 weights already reordered for it.", _SGLANG),
        ),
        "flashinfer_trtllm_routed": (
            *_TRTLLM,
            Trap("Routing weights are cut to bf16 where they are packed beside the ids.", _SGLANG),
            Trap("FP8 per tensor has no such form and ends in a type error.", _SGLANG),
        ),
        "experimental_sgl_trtllm": (*_TRTLLM, Trap("It is left out of its engine's tuning.", _SGLANG)),
        "flashinfer_cutlass": (
            Trap("It wants the up rows before the gate rows, the reverse of checkpoints.", _FLASHINFER),
            Trap("Without a reordering for 9.0, 4-bit weights give wrong numbers beyond 128 columns.", _FLASHINFER),
            Trap("MXFP4 with bf16 activations gave garbage on H100 and H200 without a word.", "FlashInfer issue 3334"),
            Trap("NVFP4 gave garbage where K per rank is no multiple of 32.", "vLLM issue 48898"),
            Trap("In all but MXFP4 an activation limit is dropped without a word.", _SGLANG),
            Trap("Ungated layers that get their tokens in FP4 write an output of half the width.", _SGLANG),
            Trap("It crashed with data-parallel attention and is put last there.", _VLLM),
            Trap("Expert-parallel ranks must be one, or as many as tensor-parallel ones.", _SGLANG),
        ),
        "flashinfer_mxfp4": (
            Trap("Hidden and inner are padded to multiples of 256, which costs memory.", _SGLANG),
            Trap("Routing rule and activation constants of gpt-oss are written into the call.", _SGLANG),
            Trap("The routed scaling factor is left to the model.", _SGLANG),
            Trap("For DeepSeek-V4 whatever is not 9.0 gets the kernels of 10.x, 8.0 and 12.0 too.", _SGLANG),
            _DRAFT,
            Trap("On 9.0 Marlin decodes faster and it is faster at prompts.", "SGLang issue 24816"),
        ),
        "flashinfer_cutedsl": (
            Trap("Its last step adds with atomics, so two runs differ.", "vLLM issue 54945"),
            _CLAMP,
            _DRAFT,
            Trap("Nothing refuses other GPUs than 10.x before the first forward pass.", _SGLANG),
        ),
        "flashinfer_b12x": (
            Trap("It gave garbage under tensor and pipeline parallelism.", "vLLM issue 47365"),
            Trap("The automatic choice leaves it out on purpose, for trouble on 12.1.", _VLLM),
            Trap("One switch of the call decides between W4A4 and W4A16.", _FLASHINFER),
        ),
        "cutlass": (
            Trap("NVFP4 layers end here whatever other name was asked for.", _SGLANG),
            Trap("NVFP4 layers with gelu are accepted and computed with silu.", _SGLANG),
            _CLAMP,
            _DRAFT,
            Trap("On several expert-parallel ranks NVFP4 fails an assertion, for it counts all experts.", _SGLANG),
            Trap("An NVFP4 expert may get 65,536 tokens, and scratch for that many is taken in each call.", _SGLANG),
        ),
        "marlin": (
            Trap("Its flag reaches an unquantised MTP layer and the start is aborted.", "vLLM issue 56832, open"),
            Trap("In NVFP4 gate and up get the gate's tensor scale; a different one of up is only warned of.", _SGLANG),
            Trap("GPTQ and AWQ checkpoints run on it and refuse its name.", _SGLANG),
            Trap("MXFP4 is refused on all but 9.0 and 12.x, although the kernels run from 8.0 on.", _SGLANG),
            Trap("In MXFP4 the routed scaling factor is left out.", _SGLANG),
            Trap("A W4A4 checkpoint runs W4A16 on it, so its numbers are not those of Blackwell.", _VLLM),
        ),
        "humming": (Trap("On layers that are not quantised its name means the automatic choice.", _VLLM),),
        "hpc": (Trap("It is said to read FP8, not under which scales; both kinds are listed.", _VLLM),),
        "aiter": (
            Trap("The routing weight goes on the input only with one expert per token.", _SGLANG),
            Trap("Ids of -1 fault: padded tokens need id 0 and weight 0.", _SGLANG),
        ),
        "emulation": (Trap("It decodes all weights in every call: for comparisons, not for speed.", _VLLM),),
        "deepep": (
            Trap("Its form for prompts cannot be captured in a CUDA graph.", _SGLANG),
            Trap("Its form for decoding takes at most 1,024 tokens per rank, 128 unless told otherwise.", _SGLANG),
            Trap("Without DeepGEMM it stops with an error that says nothing.", _SGLANG),
        ),
        "nixl": (Trap("It has no form for prompts.", _SGLANG),),
        "flashinfer": (
            Trap("It wants data-parallel attention on as many ranks as there are.", _SGLANG),
            Trap("Its token budget is checked against 1,024 per rank and made for 4,096.", _SGLANG),
            Trap("The id that means no expert depends on the backend behind it.", _SGLANG),
        ),
    }
)
