"""The config's claim about quantisation held against the formats found in the files, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from muster.checkpoint.names import grouped
from muster.checkpoint.patterns import Patterns
from muster.checkpoint.spec import ModelSpec, QuantClaim
from muster.formats.spec import Format

_SHOWN = 6
"""Groups of modules that one line names before it counts the rest."""

_HEAD_STAYS_PLAIN = ("fp8", "gptq", "awq", "auto-round")

_HARMLESS: Mapping[str, str] = {
    "gate": "quantisers neither quantise nor list routers",
    "router": "quantisers neither quantise nor list routers",
    "shared_expert_gate": "quantisers neither quantise nor list routers",
    "embed_tokens": "embeddings are not linear layers",
    "conv1d": "convolutions are not linear layers",
    "weights_proj": "the indexer's head weights stay unquantised in all releases",
    "fc": "the draft layer's input projection stays unquantised in most releases",
    "eh_proj": "the draft layer's input projection stays unquantised in most releases",
}
"""Why a plain matrix that no exception list names is no surprise, by the last part of its module's name."""

_VISION = re.compile(r"(model\.)?(visual|vision_tower|vision_model|mm_projector|multi_modal_projector)\.")

_NAMED_EXPERT = re.compile(r"experts\W{1,2}\d")
_DIGITS = re.compile(r"\d+")


class _Difference(NamedTuple):
    """One kind of difference; `pattern` has its numbers left out."""

    claimed: str
    pattern: str
    stored: str
    reason: str


def compare(formats: Mapping[str, Format], spec: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Differences between the claim and the stored format of each module, one line for each kind.

    Returns:
        Disagreements, then notes: differences that published checkpoints have without harm.
    """
    claim = spec.quant or QuantClaim("none", None, None, (), source="config.json: no quantization_config")
    kinds: dict[_Difference, list[str]] = {}
    examples: dict[_Difference, list[str]] = {}
    for names, difference, pattern in _differences(formats, claim):
        kinds.setdefault(difference, []).extend(names)
        examples.setdefault(difference, []).append(pattern)
    disagreements, notes = [], []
    for difference, names in kinds.items():
        by = _by(sorted(set(examples[difference])))
        line = f"{claim.source}: {difference.claimed} claimed{by} for {_listed(names)}; stored as {difference.stored}"
        if difference.reason:
            notes.append(f"{line} ({difference.reason})")
        else:
            disagreements.append(f"{line}; the tensors win")
    return tuple(disagreements), tuple(notes)


def _differences(formats: Mapping[str, Format], claim: QuantClaim) -> Iterator[tuple[list[str], _Difference, str]]:
    """Modules alike, how their claim differs from storage, and the pattern that makes the claim."""
    ignored = Patterns(claim.ignore, claim.source)
    layers = dict(claim.layers)
    layered = Patterns(layers, claim.source)
    for (module, stored), names in _alike(formats, (*claim.ignore, *layers)).items():
        if _VISION.match(module):
            continue
        exception = ignored.find(module)
        layer = layered.find(module) if exception is None else None
        claimed = None if exception is not None else claim.algorithm if layer is None else layers[layer]
        if claimed == stored.name or (claimed is None and not stored.quantised):
            continue
        if not stored.quantised and ignored.mentions(module):
            continue
        reason = "" if stored.quantised else _harmless(module, claim)
        pattern = exception or layer or ""
        yield names, _Difference(claimed or "no quantisation", _DIGITS.sub("N", pattern), stored.name, reason), pattern


def _alike(formats: Mapping[str, Format], patterns: Iterable[str]) -> dict[tuple[str, Format], list[str]]:
    """Modules by name and format, those of a layer's experts together unless a pattern names single experts."""
    single = any(_NAMED_EXPERT.search(pattern) for pattern in patterns)
    alike: dict[tuple[str, Format], list[str]] = {}
    for name, format in formats.items():
        head, experts, tail = name.partition(".experts.")
        number, dot, matrix = tail.partition(".")
        together = f"{head}{experts}0{dot}{matrix}" if number.isdigit() and not single else name
        alike.setdefault((together, format), []).append(name)
    return alike


def _harmless(module: str, claim: QuantClaim) -> str:
    """Why it is no surprise that this plain matrix is in no exception list; empty if it is one."""
    if claim.method in _HEAD_STAYS_PLAIN and module.endswith(("lm_head", "shared_head.head")):
        return f"{claim.method} checkpoints leave the output head alone"
    return _HARMLESS.get(module.rpartition(".")[2], "")


def _by(patterns: list[str]) -> str:
    if not patterns or not patterns[0]:
        return ""
    return f" by {patterns[0]}" + (f" and {len(patterns) - 1} like it" if len(patterns) > 1 else "")


def _listed(names: list[str]) -> str:
    groups = grouped(names, "modules")
    more = f" and {len(groups) - _SHOWN} more groups" if len(groups) > _SHOWN else ""
    return ", ".join(groups[:_SHOWN]) + more
