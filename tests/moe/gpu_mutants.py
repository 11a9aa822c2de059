"""A program that puts deliberate bugs into the sources of the GPU kernels: each must be rejected.

On the interpreter (TRITON_INTERPRET=1) only Triton's sources are tried, else all, on the GPU.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from muster.formats.spec import FP8_BLOCK, FP8_CHANNEL, MXFP4, NVFP4, Format, int4
from muster.lab.prove.tolerance import LIMITS, grade, rms, rounding_of
from muster.moe.backend import Routed
from muster.moe.experts import bind
from muster.moe.kernels import decode_layer, triton_layer, wgmma_layer
from muster.moe.problem import MoEProblem
from muster.moe.reference import expert_layer
from muster.moe.weights import ExpertWeights
from muster.workspace import Workspace

from .cases import GPT_OSS, Case, build, problem

SOURCES = ("triton_codes", "triton_products", "triton_experts")
"""Triton's kernels, each file after those that it imports."""
TRITON = {
    "up scaled as gate": ("nvfp4", "rows_N // (N // R_COUNT)", "rows_N * 0"),
    "wrong activation": ("nvfp4", "inner = gate * tl.sigmoid(gate) * up", "inner = gate * tl.sigmoid(up) * up"),
    "last columns skipped": ("nvfp4", "for k in range(0, K, BLOCK_K)", "for k in range(0, K - BLOCK_K, BLOCK_K)"),
    "high nibbles under the scales of the low": ("nvfp4", "s_ptrs + HALF // GROUP, rows", "s_ptrs, rows"),
    "last slot not summed": ("nvfp4", "for k in tl.static_range(TOP_K):", "for k in tl.static_range(TOP_K - 1):"),
    "not weighted": ("nvfp4", "acc *= tl.load(weights_ptr", "acc *= 1.0 + 0.0 * tl.load(weights_ptr"),
    "another token's row": ("nvfp4", "(slots_M // TOP_K).to(tl.int64)", "(slots_M % TOP_K).to(tl.int64)"),
    "2 % off": ("nvfp4", "tl.store(y_ptrs, bf16(acc, ASM)", "tl.store(y_ptrs, bf16(acc * 1.02, ASM)"),
    "bias omitted": ("mxfp4", "acc += tl.load(bias_ptr + expert * D", "acc += 0.0 * tl.load(bias_ptr + expert * D"),
    "limit omitted": ("mxfp4", "gate = tl.where(gate > limit, limit, gate)", "gate = gate"),
    "high integers under the scales of the low": ("int4-g32", "tl.load(s_ptr + at_high", "tl.load(s_ptr + at_low"),
    "zero points all 8": ("int4-g32", "other=0).to(tl.float32) + 128.0", "other=0).to(tl.float32) * 0.0 + 136.0"),
    "zero points one off": (
        "int4-g128",
        ".to(tl.float32) + 128.0\n        if ASM",
        ".to(tl.float32) + 129.0\n        if ASM",
    ),
    "integers' scales of the first group": ("int4-g128", "at_high = (k + HALF) // GROUP * N", "at_high = 0 * k"),
    "scale of the next channel": ("fp8-channel", "rows_N // (N // R_COUNT)", "(rows_N ^ 1)"),
    "scale of the first block": ("fp8-block", "tl.cdiv(K, GROUP) + k // GROUP", "tl.cdiv(K, GROUP) + k * 0"),
    "tokens under their first scale": ("w8a8", "xs_ptrs_M + k // SPAN", "xs_ptrs_M + k * 0"),
    "large tokens cut off": ("w8a8", "448.0, tl.float32", "512.0, tl.float32"),
    "tokens scaled as another": ("w8a8", "tokens_M * tl.cdiv(D, SPAN)", "0 * tokens_M"),
}
"""By bug: the problem that must show it, what stands in the source, and the bug."""
E2M1 = {
    "rows under each other's scale": ("(w << 3) & (SIGN | REST), scale1", "(w << 3) & (SIGN | REST), scale0"),
    "sign lost": ("((w << 6) & REST) | ((w << 2) & SIGN)", "((w << 6) & REST)"),
    "up scaled as gate": ("2 * expert + (row >= rows / 2)", "2 * expert"),
}
E4M3 = {
    "sign lost": ("((w << 8) & SIGN) | ((w << 4) & REST)", "((w << 4) & REST)"),
    "rows exchanged": ("pairs(word(1, j), a[1], a[3]);", "pairs(word(0, j), a[1], a[3]);"),
}
DECODE = {
    "a warp's part not added": ("sum.x += more.x;", "sum.x += k == 1 ? 0.0f : more.x;"),
    "last slot not summed": (
        "for (int k = 0; k < SUMMED; ++k) {\n        if",
        "for (int k = 0; k < SUMMED - 1; ++k) {\n        if",
    ),
    "not weighted": ("v *= weights[slot];", "v *= 1.0f;"),
    "another token's row": ("(slot / TOP_K) * COLUMNS", "(slot % TOP_K) * COLUMNS"),
}
DECODE_E4M3 = {"first rows' scale for all": ("of_row(now[r].scales, i)", "of_row(now[r].scales, 0)")}
WGMMA = {
    "every tile the first": ("min(tile + m, sizes.tiles - 1)", "tile"),
    "not weighted": ("routing_weights[next.slots[i]] : 0.0f", "1.0f : 0.0f"),
    "units not swizzled": ("(column / 8 ^ token) % 8", "column / 8 % 8"),
    "the next chunk's token rows": ("rows + d * (ROW_BYTES / 16)", "rows"),
}
WGMMA_E4M3 = {
    "stages under the first scale": ("scales[m] = now;", "if (start == 0) scales[m] = now;"),
    "first rows' scale for all": ("of_row(by[m], i)", "of_row(by[m], 0)"),
}
WGMMA_W8A8 = {
    "tokens under another stage's scales": ("at.token_scales + at.stage * (MOST * 4)", "at.token_scales"),
    "first rows' scale for all": ("of_row(words.codes[0][m].scales, k)", "of_row(words.codes[0][m].scales, 0)"),
}
BYTES = {
    "signs lost": ("| (w << 4 & 0x80808080u)", "| 0u"),
    "rows under each other's scale": ("tables[scales >> 8]", "tables[scales & 255u]"),
}
QUANTISE = {
    "large tokens cut off": ("448.0f", "512.0f"),
    "columns as they are stored": ("chunk * 16 + product * 8 + half * 4 + t", "lane"),
}
ARRANGE = {
    "another token's row": ("x[((long long)(slot[i] / top_k)", "x[((long long)(slot[i] % top_k)"),
    "columns as they are stored": (
        "words[0], words[8], words[16], words[24]",
        "words[0], words[1], words[2], words[3]",
    ),
}


def small(weights: Format, hidden: int = 256, inner: int = 64, **traits: Any) -> MoEProblem:
    """A layer that shows them: two steps along the columns of `gate_up`."""
    return problem(hidden, inner, experts=3, weights=weights, dtype="bf16", **traits)


PROBLEMS = {
    "nvfp4": small(NVFP4, top_k=3),
    "mxfp4": small(MXFP4, bias=True, activation=GPT_OSS),
    "int4-g32": small(int4(32)),
    "int4-g128": small(int4(128), inner=128),
    "fp8-channel": small(FP8_CHANNEL),
    "fp8-block": small(FP8_BLOCK),
    "w8a8": small(FP8_BLOCK, inner=192),
}
CUDA, CUDA_E4M3 = (
    problem(hidden=256, inner=256, experts=4, top_k=3, weights=format, dtype="bf16") for format in (NVFP4, FP8_BLOCK)
)
"""What the kernels in CUDA compute: several chunks of columns, and blocks of FP8, in both products."""
TOKENS = 9


def backend(name: str) -> str:
    """What computes that problem, of the Triton backends."""
    return "triton_w8a8" if name == "w8a8" else "triton_fused"


def accepted(backend: str, given: MoEProblem, device: torch.device) -> bool:
    """Whether the judge takes what the backend computes now."""
    inputs = build(Case(given, tokens=TOKENS), TOKENS)
    truth = expert_layer(given, inputs.weights, inputs.x_TD, inputs.routed, rounding=rounding_of(backend, given))
    weights = ExpertWeights(*(_moved(matrix, device) for matrix in (inputs.weights.gate_up, inputs.weights.down)))
    if given.bias:
        biases = inputs.weights.gate_up_bias, inputs.weights.down_bias
        weights = replace(weights, gate_up_bias=biases[0].to(device), down_bias=biases[1].to(device))
    x, routed = inputs.x_TD.to(device), Routed(inputs.routed.ids_TK.to(device), inputs.routed.weights_TK.to(device))
    out = torch.full_like(x, torch.nan)
    bind(backend, given, weights).run(x, routed, out, Workspace(device))
    limit = LIMITS[grade(rounding_of(backend, given), "bf16")].of(TOKENS)
    whole, worst = rms(out.cpu(), truth.to(out.dtype))
    return whole <= limit.whole and worst <= limit.worst_token


def _moved(matrix, device):  # type: ignore[no-untyped-def]
    return matrix.with_tensors({name: tensor.to(device) for name, tensor in matrix.tensors.items()}, matrix.shape)


def mutated(path: Path, old: str, new: str, folder: Path, number: int) -> Path:
    """A copy of the source with the bug."""
    source = path.read_text()
    assert source.count(old) == 1, f"{path.name} has {source.count(old)} of {old!r}"
    target = folder / f"mutant_{number}{path.suffix}"
    target.write_text(source.replace(old, new))
    return target


def mutant(old: str, new: str, folder: Path, number: int) -> ModuleType:
    """Triton's kernels with the bug, wherever it is: copies of all their files that import each other."""
    texts = {name: Path(triton_layer.__file__).with_name(f"{name}.py").read_text() for name in SOURCES}
    assert sum(text.count(old) > 0 for text in texts.values()) == 1, f"not in one file of the kernels: {old!r}"
    for name, text in texts.items():
        for other in SOURCES:
            text = text.replace(f"from muster.moe.kernels.{other} import", f"from mutant_{number}_{other} import")
        (folder / f"mutant_{number}_{name}.py").write_text(text.replace(old, new))
    return importlib.import_module(f"mutant_{number}_{SOURCES[-1]}")


def cuda() -> Iterator[tuple[ModuleType, Path, str, str, MoEProblem, dict[str, tuple[str, str]]]]:
    """Of each source in CUDA the module that compiles it, its path and name there, who runs it on what, its bugs."""
    for backend_name, layer, attribute, given, mutants in (
        ("decode", decode_layer, "SHARED", CUDA, E2M1),
        ("decode", decode_layer, "SHARED", CUDA_E4M3, E4M3),
        ("decode", decode_layer, "SOURCE", CUDA, DECODE),
        ("decode", decode_layer, "SOURCE", CUDA_E4M3, DECODE_E4M3),
        ("wgmma", wgmma_layer, "SHARED", CUDA, E2M1),
        ("wgmma", wgmma_layer, "SHARED", CUDA_E4M3, E4M3),
        ("wgmma", wgmma_layer, "SOURCE", CUDA, WGMMA),
        ("wgmma", wgmma_layer, "SOURCE", CUDA_E4M3, WGMMA_E4M3),
        ("wgmma", wgmma_layer, "ARRANGE", CUDA, ARRANGE),
        ("wgmma_w8a8", wgmma_layer, "SOURCE", CUDA_E4M3, WGMMA_W8A8),
        ("wgmma_w8a8", wgmma_layer, "QUANTISE", CUDA_E4M3, QUANTISE),
        ("wgmma_w4a8", wgmma_layer, "SHARED", CUDA, BYTES),
    ):
        yield layer, getattr(layer, attribute), attribute, backend_name, given, mutants


def main() -> None:
    """Prints one line of JSON per kernel source and bug: whether it was accepted."""
    device = torch.device("cpu" if triton_layer.interpreted() else "cuda")
    folder, right = Path(tempfile.mkdtemp()), triton_layer.kernels
    sys.path.insert(0, str(folder))
    for name, given in PROBLEMS.items():
        sys.stdout.write(json.dumps(["triton", f"as it is, {name}", accepted(backend(name), given, device)]) + "\n")
    for number, (bug, (name, *change)) in enumerate(TRITON.items()):
        triton_layer.kernels = mutant(*change, folder, number)  # type: ignore[assignment]
        sys.stdout.write(json.dumps(["triton", bug, accepted(backend(name), PROBLEMS[name], device)]) + "\n")
    triton_layer.kernels = right
    if device.type == "cpu":
        return
    for layer, source, attribute, backend_name, given, mutants in cuda():
        for bug, change in {"as it is": None, **mutants}.items():
            number += 1
            setattr(layer, attribute, source if change is None else mutated(source, *change, folder, number))
            for kernel in (decode_layer.compiled, wgmma_layer.product, wgmma_layer.arrange, wgmma_layer.quantise):
                kernel.cache_clear()
            found = accepted(backend_name, given, device)
            name = f"{backend_name} {source.name}, {given.weights.name}"
            sys.stdout.write(json.dumps([name, bug, found]) + "\n")
        setattr(layer, attribute, source)


if __name__ == "__main__":
    main()
