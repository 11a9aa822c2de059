"""The config's claim about quantisation held against the formats found in the files, in both directions."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from muster.checkpoint.claimed import Claims
from muster.checkpoint.names import grouped
from muster.checkpoint.spec import ModelSpec, QuantClaim
from muster.formats.spec import Format

_SHOWN = 6
"""Groups of modules that one line names before it counts the rest."""

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
    claims = Claims(claim)
    for module, stored, names in _alike(formats, claim):
        if _VISION.match(module):
            continue
        claimed, _, pattern = claims.of(module)
        if claimed == stored.name or (claimed is None and not stored.quantised):
            continue
        if not stored.quantised and claims.mentions(module):
            continue
        reason = "" if stored.quantised else claims.left_alone(module)
        yield names, _Difference(claimed or "no quantisation", _DIGITS.sub("N", pattern), stored.name, reason), pattern


def names_single_experts(claim: QuantClaim) -> bool:
    """Whether a pattern tells the experts of a layer apart."""
    return any(_NAMED_EXPERT.search(pattern) for pattern in (*claim.ignore, *dict(claim.layers)))


def _alike(formats: Mapping[str, Format], claim: QuantClaim) -> Iterator[tuple[str, Format, list[str]]]:
    """Modules with name and format, those of a layer's experts together unless a pattern names single experts."""
    single = names_single_experts(claim)
    alike: dict[tuple[str, str, str], list[str]] = {}
    for name, format in formats.items():
        head, experts, tail = ("", "", "") if single else name.partition(".experts.")
        number, _, matrix = tail.partition(".")
        key = (head, matrix, format.name) if experts and number.isdigit() else (name, "", format.name)
        alike.setdefault(key, []).append(name)
    for (head, matrix, _), names in alike.items():
        yield f"{head}.experts.0.{matrix}" if matrix else head, formats[names[0]], names


def _by(patterns: list[str]) -> str:
    if not patterns or not patterns[0]:
        return ""
    return f" by {patterns[0]}" + (f" and {len(patterns) - 1} like it" if len(patterns) > 1 else "")


def _listed(names: list[str]) -> str:
    groups = grouped(names, "modules")
    more = f" and {len(groups) - _SHOWN} more groups" if len(groups) > _SHOWN else ""
    return ", ".join(groups[:_SHOWN]) + more
