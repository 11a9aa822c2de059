"""Tensor names as data: where each family keeps the parts of a layer, and what may be left unread, and why.

Names are those of the published checkpoints. Everything below a layer is relative to `<prefix>layers.<N>.`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from muster.checkpoint.spec import ModelSpec

_LONGEST_SHOWN = 200


@dataclass(frozen=True)
class ExpertNames:
    """One way to name the parts of an expert layer.

    Attributes:
        router: module of the gate.
        selection_bias: tensor of the selection-only bias.
        experts: module of the routed experts.
        gate, up, down: modules of one expert, under `<experts>.<E>.`.
        gate_up_stacked, down_stacked: all experts in one tensor, under `<experts>.`.
        shared: module of the shared expert.
        shared_gate: module of the shared expert's sigmoid gate.
        interleaved: stacked gate and up rows alternate.
        transposed: stacked tensors without quantisation are `[E, in, out]`.
    """

    router: str = "mlp.gate"
    selection_bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    gate_up_stacked: str = "gate_up_proj"
    down_stacked: str = "down_proj"
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    interleaved: bool = False
    transposed: bool = False


_STANDARD = ExpertNames()
_QWEN = ExpertNames(shared="mlp.shared_expert")
_GPT_OSS = ExpertNames(router="mlp.router", interleaved=True, transposed=True)
_BLOCK_SPARSE = ExpertNames(
    router="block_sparse_moe.gate",
    selection_bias="block_sparse_moe.e_score_correction_bias",
    experts="block_sparse_moe.experts",
    gate="w1",
    up="w3",
    down="w2",
)


@dataclass(frozen=True)
class Waiver:
    """Tensors that may stay unread: a glob over tensor names (`*` matches anything) and the reason."""

    pattern: str
    reason: str


@dataclass(frozen=True)
class FamilyNames:
    """The names of one family.

    Attributes:
        experts: how its expert layers are named, the published way first.
        head: module of the output projection.
        draft: where draft (MTP) layers live: after the last decoder layer, under `mtp.`, or nowhere.
        draft_copies: draft layers hold copies of the embedding and the output head.
        waived: tensors that text generation does not need.
    """

    experts: tuple[ExpertNames, ...] = (_STANDARD,)
    head: str = "lm_head"
    draft: Literal["none", "after", "mtp"] = "none"
    draft_copies: bool = False
    waived: tuple[Waiver, ...] = ()


_VISION = "part of the vision tower; text is served"
_ROTARY = Waiver("*.rotary_emb.inv_freq", "recomputed from the config")
_KV_SCALES = tuple(
    Waiver(f"*.{name}", "the key-value cache is not quantised")
    for name in ("k_proj.k_scale", "v_proj.v_scale", "attn.k_scale", "attn.v_scale", "self_attn.kv_scale")
)
_DEEPSEEK = FamilyNames(draft="after", draft_copies=True)
_QWEN_HYBRID = FamilyNames(experts=(_QWEN,), draft="mtp")

FAMILIES: Mapping[str, FamilyNames] = MappingProxyType(
    {
        "mixtral": FamilyNames(experts=(_BLOCK_SPARSE, _STANDARD)),
        "olmoe": FamilyNames(),
        "qwen3_moe": FamilyNames(experts=(_QWEN,)),
        "qwen3_next": _QWEN_HYBRID,
        "qwen3_5_moe": replace(_QWEN_HYBRID, waived=(Waiver("model.visual.*", _VISION),)),
        "qwen3_5_moe_text": _QWEN_HYBRID,
        "glm4_moe": _DEEPSEEK,
        "glm_moe_dsa": FamilyNames(draft="after"),
        "deepseek_v3": _DEEPSEEK,
        "deepseek_v32": _DEEPSEEK,
        "kimi_k2": _DEEPSEEK,
        "kimi_k25": FamilyNames(
            head="language_model.lm_head",
            draft="after",
            waived=(Waiver("vision_tower.*", _VISION), Waiver("mm_projector.*", _VISION)),
        ),
        "minimax_m2": FamilyNames(experts=(_BLOCK_SPARSE, _STANDARD), draft="after"),
        "gpt_oss": FamilyNames(experts=(_GPT_OSS,)),
    }
)
"""The families by `ModelSpec.family`."""


@dataclass(frozen=True)
class Names:
    """The module paths of one model."""

    spec: ModelSpec

    @property
    def family(self) -> FamilyNames:
        """The family's table; families that are not in it use the common names."""
        return FAMILIES.get(self.spec.family, FamilyNames())

    @property
    def embed(self) -> str:
        """Module of the token embedding."""
        return f"{self.spec.prefix}embed_tokens"

    @property
    def norm(self) -> str:
        """Module of the final norm."""
        return f"{self.spec.prefix}norm"

    @property
    def head(self) -> str:
        """Module of the output projection."""
        return self.family.head

    def layer(self, layer: int) -> str:
        """Module of a layer; numbers from the decoder's depth on are draft layers."""
        beyond = layer - len(self.spec.layers)
        if beyond >= 0 and self.family.draft == "mtp":
            return f"mtp.layers.{beyond}"
        return f"{self.spec.prefix}layers.{layer}"

    def waivers(self, *, draft: bool) -> tuple[Waiver, ...]:
        """What need not be read: `draft` says whether draft layers are going to be run."""
        waivers = (*self.family.waived, *_KV_SCALES, _ROTARY)
        if self.spec.tied_embeddings:
            waivers += (Waiver(f"{self.head}.weight", "tied to the embedding"),)
        if self.family.draft == "none":
            return waivers
        depth = len(self.spec.layers)
        last = depth + max(1, self.spec.draft_layers)
        if self.family.draft == "after":
            roots = [self.layer(layer) for layer in range(depth, last)]
            twice = [f"{root}.{part}.weight" for root in roots for part in ("embed_tokens", "shared_head.head")]
            waivers += tuple(Waiver(name, "a copy of the model's own") for name in twice)
        else:
            roots = ["mtp"]
        if not draft:
            waivers += tuple(Waiver(f"{root}.*", "a draft layer; no draft is run") for root in roots)
        return waivers


def shown(text: str) -> str:
    """A name fit for a message: printable, and not longer than a few lines."""
    text = text if text.isprintable() else ascii(text)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}..."


def grouped(names: Iterable[str], noun: str = "tensors") -> list[str]:
    """All names in few words: numbers between dots that vary together become ranges, nothing is left out.

    `["a.0.w", "a.1.w", "a.3.w"]` becomes `["a.{0-1,3}.w (3 tensors)"]`.
    """
    forms: dict[str, set[tuple[int, ...]]] = {}
    for name in names:
        numbers = tuple(map(int, _NUMBER.findall(name)))
        if len(numbers) > _MOST_NUMBERS:
            forms[name] = {()}
        else:
            forms.setdefault(_NUMBER.sub("\0", name), set()).add(numbers)
    return [_spell(form, block, noun) for form, rows in forms.items() for block in _blocks(rows)]


_NUMBER = re.compile(r"(?<=\.)(?:0|[1-9][0-9]{0,8})(?=\.|$)")
_MOST_NUMBERS = 6


def _blocks(rows: Collection[tuple[int, ...]]) -> list[tuple[tuple[int, ...], ...]]:
    """Splits a set of number tuples into products of sets, each a tuple of axes."""
    if not next(iter(rows)):
        return [()]
    tails: dict[int, set[tuple[int, ...]]] = {}
    for first, *rest in rows:
        tails.setdefault(first, set()).add(tuple(rest))
    heads: dict[frozenset[tuple[int, ...]], list[int]] = {}
    for first, rest_rows in sorted(tails.items()):
        heads.setdefault(frozenset(rest_rows), []).append(first)
    return [(tuple(firsts), *block) for rest, firsts in heads.items() for block in _blocks(rest)]


def _spell(form: str, block: tuple[tuple[int, ...], ...], noun: str) -> str:
    text, count = form, 1
    for axis in block:
        count *= len(axis)
        text = text.replace("\0", str(axis[0]) if len(axis) == 1 else f"{{{ranges(axis)}}}", 1)
    return shown(text) + (f" ({count:,} {noun})" if count > 1 else "")


def ranges(numbers: Iterable[int]) -> str:
    """Rising numbers in few words: `0-2,7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], number]
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
