"""Tiny models of transformers as the truth, and a hand-driven step loop for ours."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from muster.attention.interface import AttentionBatch
from muster.model.decoder import Decoder

CLASSES: dict[str, tuple[type, type]] = {
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmoe": (OlmoeConfig, OlmoeForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
}

SHAPE: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

FAMILY_SHAPE: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 6, "intermediate_size": 96},
    "olmoe": {"num_experts": 6, "intermediate_size": 96},
    "qwen3_moe": {"num_experts": 6, "moe_intermediate_size": 96, "intermediate_size": 160, "head_dim": 32},
}


def make(family: str, *, seed: int = 0, stored: torch.dtype = torch.float32, **options: Any) -> PreTrainedModel:
    """A float32 model, its weights rounded to `stored`, and large enough that every expert shows in the logits.

    Queries and keys stay near unit size: sharper attention would only blow up the rounding of both sides.
    """
    config_class, model_class = CLASSES[family]
    model = model_class(config_class(**{**SHAPE, **FAMILY_SHAPE[family], **options})).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("bias"):
                value = 0.3 * noise
            elif parameter.dim() == 1:
                value = 1.0 + 0.3 * noise
            else:
                gain = 3.0 if "gate.weight" in name else 1.0 if "q_proj" in name or "k_proj" in name else 1.5
                value = noise * gain / parameter.shape[-1] ** 0.5
            parameter.copy_(value.to(stored))
    return model


def save(model: PreTrainedModel, directory: Path, stored: torch.dtype = torch.float32) -> Path:
    """Writes a copy: casting the model itself would round its rotary frequencies too."""
    copy.deepcopy(model).to(stored).save_pretrained(directory)
    return directory


def tokens(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, SHAPE["vocab_size"], (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.no_grad()
def truth(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    """Logits of every position, `[T, V]`."""
    return model(torch.tensor([list(ids)])).logits[0]


class Driver:
    """Steps sequences through a decoder on scattered pages, without an engine; unwritten cache is NaN."""

    def __init__(self, decoder: Decoder, pages: int = 64, page_size: int = 4) -> None:
        self._decoder = decoder
        self._page_size = page_size
        self._cache = decoder.new_cache(pages, page_size)
        for layer in self._cache:
            layer.key_PSMH.fill_(torch.nan)
            layer.value_PSMH.fill_(torch.nan)
        self._free = torch.randperm(pages, generator=torch.Generator().manual_seed(9)).tolist()
        self._pages: dict[int, list[int]] = {}
        self._done: dict[int, int] = {}

    def step(self, work: dict[int, Sequence[int]], rows: Sequence[int] | None = None) -> Tensor:
        """Feeds each sequence its next tokens; logits of `rows` (all, if None) of the step's tokens."""
        positions, slots, starts, lengths = [], [], [0], []
        for sequence, ids in work.items():
            first = self._done.get(sequence, 0)
            owned = self._pages.setdefault(sequence, [])
            while len(owned) * self._page_size < first + len(ids):
                owned.append(self._free.pop())
            span = range(first, first + len(ids))
            positions += span
            slots += [owned[at // self._page_size] * self._page_size + at % self._page_size for at in span]
            starts.append(starts[-1] + len(ids))
            lengths.append(span.stop)
            self._done[sequence] = span.stop
        tables = [self._pages[sequence] for sequence in work]
        width = max(map(len, tables))
        batch = AttentionBatch(
            torch.tensor(positions),
            torch.tensor(slots),
            torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
            tuple(starts),
            tuple(lengths),
        )
        flat = torch.tensor(list(itertools.chain.from_iterable(work.values())))
        chosen = range(len(flat)) if rows is None else rows
        return self._decoder.forward(flat, batch, self._cache, torch.tensor(chosen, dtype=torch.int64))


def chunked(decoder: Decoder, ids: Sequence[int], chunks: Sequence[int]) -> Tensor:
    """Logits of every position, the sequence fed in chunks of these sizes."""
    assert sum(chunks) == len(ids)
    driver, at, logits = Driver(decoder), 0, []
    for count in chunks:
        logits.append(driver.step({0: ids[at : at + count]}))
        at += count
    return torch.cat(logits)


def error(got: Tensor, wanted: Tensor) -> float:
    """The larger of the relative RMS over all rows and that of the worst row; NaN counts as infinite."""
    rows = (got.double() - wanted.double()).square().mean(-1).sqrt()
    sizes = wanted.double().square().mean(-1).sqrt()
    worst = float((rows / sizes).max())
    whole = float(rows.square().mean().sqrt() / sizes.square().mean().sqrt())
    return float("inf") if worst != worst else max(worst, whole)
