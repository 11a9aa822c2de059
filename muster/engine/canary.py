"""The canary: before an engine is ready, the loaded model shows on its own weights that what was chosen computes right.

It looks for what a proof of single parts cannot see: weights loaded into the wrong place, a cache that decode reads
otherwise than prefill wrote it, a model that answers the same to everything. It is no second proof: its limits are
wide, and only a wrong computation passes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from muster.attention.interface import AttentionBatch, KVPages
from muster.device import DTYPES
from muster.errors import NumericsError
from muster.model.decoder import Decoder

TOKENS = 4
LENGTH = 9
"""Tokens of the text that the model reads: at once, and all but the last and then the last."""
LIMITS: Mapping[str, float] = MappingProxyType({"f32": 1e-3, "bf16": 0.1})
"""Relative RMS, by the dtype of activations; a swapped matrix or a scale applied twice is off by 1 and more."""


def sing(decoder: Decoder) -> None:
    """Runs the canary; a few milliseconds for a small model.

    Raises:
        NumericsError: everything it saw that is wrong.
    """
    with torch.inference_mode():
        problems = [*_experts(decoder), *_logits(decoder)]
    error = NumericsError.gather(
        "canary", problems, hint="the engine is not ready; run muster verify on this checkpoint"
    )
    if error is not None:
        raise error


def _experts(decoder: Decoder) -> list[NumericsError]:
    """The first and the last expert layer, every planned backend against the float64 reference."""
    layers = decoder.expert_layers
    problems = []
    for number in sorted({*list(layers)[:1], *list(layers)[-1:]}):
        limit = LIMITS[decoder.device.activations]
        for backend, distance in layers[number].distances(_activations(decoder)).items():
            if not distance <= limit:
                problems.append(
                    NumericsError(
                        f"experts of layer {number} by {backend}",
                        found=f"a relative RMS of {distance:.2g} from the reference",
                        expected=f"at most {limit:g}",
                    )
                )
    return problems


def _activations(decoder: Decoder) -> Tensor:
    """What follows a norm: numbers of size one."""
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(TOKENS, decoder.spec.hidden, generator=generator)
    return x_TD.to(decoder.device.torch_device, DTYPES[decoder.device.activations])


def _logits(decoder: Decoder) -> list[NumericsError]:
    """Finite, not constant, not the same at every position, and from decode what they are from prefill."""
    length = min(LENGTH, decoder.spec.context)
    tokens_T = torch.arange(1, length + 1) * (decoder.spec.vocab - 1) // (length + 1)
    whole_TV = _forward(decoder, decoder.new_cache(1, LENGTH), tokens_T, 0)
    bad = int((~whole_TV.isfinite()).sum())
    if bad:
        return [NumericsError("logits", found=f"{bad} of {whole_TV.numel()} are NaN or infinite", expected="finite")]
    problems = []
    size = whole_TV.square().mean().sqrt()
    if not (whole_TV.std(-1) > 1e-6 * size).all():
        problems.append(NumericsError("logits", found="the same for every token of the vocabulary", expected="various"))
    if length > 1 and not (whole_TV[1:] - whole_TV[:-1]).abs().amax() > 1e-6 * size:
        problems.append(NumericsError("logits", found="the same after every token", expected="various"))
    if length > 1:
        problems += _decoded(decoder, tokens_T, whole_TV[-1])
    return problems


def _decoded(decoder: Decoder, tokens_T: Tensor, expected_V: Tensor) -> list[NumericsError]:
    cache = decoder.new_cache(1, LENGTH)
    _forward(decoder, cache, tokens_T[:-1], 0)
    found_V = _forward(decoder, cache, tokens_T[-1:], len(tokens_T) - 1)[-1]
    distance = float((found_V - expected_V).square().mean().sqrt() / expected_V.square().mean().sqrt())
    limit = LIMITS[decoder.device.activations]
    if distance <= limit:
        return []
    found = f"a relative RMS of {distance:.2g} between prefill and decode of the same tokens"
    return [NumericsError("logits", found=found, expected=f"at most {limit:g}")]


def _forward(decoder: Decoder, cache: tuple[KVPages, ...], tokens_T: Tensor, start: int) -> Tensor:
    """Logits `[T, V]` of one sequence's tokens, `start` of which are in the cache's only page already."""
    positions_T = torch.arange(start, start + len(tokens_T))
    pages_BP = torch.zeros(1, 1, dtype=torch.int32)
    batch = AttentionBatch(positions_T, positions_T, pages_BP, (0, len(tokens_T)), (start + len(tokens_T),))
    return decoder.forward(tokens_T, batch, cache, torch.arange(len(tokens_T)))
