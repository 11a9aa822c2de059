"""What a config claims about quantisation, whatever the dialect; the tensors outrank it (see `quant`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from muster.checkpoint.fields import Fields
from muster.checkpoint.keys import QUANT_WAIVED
from muster.checkpoint.quantmethods import METHODS, Body, modelopt
from muster.checkpoint.spec import QuantClaim
from muster.errors import ConfigError

HF_QUANT_CONFIG = "hf_quant_config.json"


def read_claims(
    top: Fields, hf_quant: Mapping[str, object] | None
) -> tuple[QuantClaim | None, list[str], list[ConfigError]]:
    """The claim of config.json (`top`) and hf_quant_config.json together, notes, and the latter's problems.

    config.json may hold `quantization_config` at the top or inside `text_config`; its problems go to `top`.
    """
    places = (("quantization_config",), ("text_config", "quantization_config"))
    claims = [_read_claim(top.under(*place)) for place in places if top.has_object(*place)]
    beside = Fields.of(hf_quant or {}, HF_QUANT_CONFIG)
    if hf_quant is not None:
        beside.waive(*QUANT_WAIVED)
        stated = bool(beside.entries("quantization"))
        beside.check(stated, ("quantization",), "quantization", "nothing", "an object with quant_algo")
        if stated:
            c = beside.under("quantization")
            claims.append(_claim(c, "modelopt", modelopt(c)))
    notes: list[str] = []
    claim = claims[0] if claims else None
    for other in claims[1:]:
        claim, differing = _reconcile(claim or other, other, top)
        notes += differing
    return claim, [*notes, *beside.unknown()], beside.ledger.problems


def _read_claim(c: Fields) -> QuantClaim:
    c.waive(*QUANT_WAIVED)
    method = c.word("quant_method", choices=tuple(METHODS), default="modelopt" if c.stated("quant_algo") else None)
    return _claim(c, method, METHODS[method](c))


def _reconcile(one: QuantClaim, other: QuantClaim, c: Fields) -> tuple[QuantClaim, list[str]]:
    """Two claims as one, and what differs without being a contradiction.

    What is quantised, and how, must be the same in both. Exception lists often differ because only one file was
    repaired by hand; the tensors decide there, so a difference is a note.
    """
    for what, first, second in (
        ("algorithm", one.algorithm or "mixed", other.algorithm or "mixed"),
        ("key-value cache format", one.kv_cache, other.kv_cache),
    ):
        found = f"{first} in {one.source} and {second} in {other.source}"
        agree = None in (first, second) or first == second
        c.check(agree, (), f"quantisation {what}", found, "one answer in both files")
    named, others = dict(one.layers), dict(other.layers)
    differing = sorted(key for key in {**named, **others} if named.get(key) != others.get(key))
    if differing and named and others:
        key = differing[0]
        found = f"{key} is {named.get(key)} in {one.source} and {others.get(key)} in {other.source}"
        c.check(False, (), "quantised layers", found, "one answer in both files")
    notes = []
    only = sorted(set(one.ignore) ^ set(other.ignore))
    if only:
        notes.append(
            f"{one.source} and {other.source} differ in {len(only)} modules left unquantised ({', '.join(only[:3])}"
            f"{', ...' if len(only) > 3 else ''}); the tensors decide"
        )
    inputs = tuple({**dict(other.activations), **dict(one.activations)}.items())
    merged = replace(
        one, kv_cache=one.kv_cache or other.kv_cache, layers=one.layers or other.layers, activations=inputs
    )
    return merged, notes


def _claim(c: Fields, method: str, body: Body) -> QuantClaim:
    return QuantClaim(
        method=method,
        algorithm=body.algorithm,
        group=_group(body.algorithm),
        ignore=body.ignore,
        layers=body.layers,
        activations=body.activations,
        kv_cache=body.kv_cache,
        packing=body.packing,
        source=f"{c.ledger.file}: {c.label()}",
    )


def _group(algorithm: str | None) -> int | None:
    if algorithm is not None and algorithm.startswith("int4-g"):
        return int(algorithm.removeprefix("int4-g"))
    return {"nvfp4": 16, "mxfp4": 32}.get(algorithm or "")
