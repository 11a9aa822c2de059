"""Rotary embedding as configs state it: `rope_parameters`, or `rope_theta` with `rope_scaling` and friends."""

from __future__ import annotations

import math

from muster.checkpoint.fields import Fields
from muster.checkpoint.spec import RopeSpec, YarnSpec

_PLACES = ("rope_parameters", "rope_scaling")


def _keys(name: str) -> tuple[str, ...]:
    return tuple(f"{place}.{name}" for place in _PLACES)


def read_rope(
    c: Fields, head_dim: int, *, partial: bool = False, interleaved: bool = False, latent: bool = False
) -> RopeSpec:
    """The rotary embedding of heads of `head_dim` rotated entries (all of them unless the family is `partial`).

    `latent` heads (MLA) scale the softmax by YaRN's mscale_all_dim; see `softmax_scale`.
    """
    theta = c.number(*_keys("rope_theta"), "rope_theta", above=1.0)
    default = None if any(c.stated(key) for key in _keys("factor")) else "default"
    kind = c.word(*_keys("rope_type"), *_keys("type"), choices=("default", "yarn"), default=default)
    c.waive(*_keys("mrope_section"), *_keys("mrope_interleaved"))
    if kind == "default":
        for key in (*_keys("factor"), *_keys("attention_factor")):
            c.same(key, 1.0)
    yarn = _read_yarn(c, latent) if kind == "yarn" else None
    return RopeSpec(theta=theta, width=_read_width(c, head_dim, partial), interleaved=interleaved, yarn=yarn)


def softmax_scale(head_dim: int, rope: RopeSpec) -> float:
    """head_dim^-0.5, times YaRN's (0.1 * mscale_all_dim * ln(factor) + 1)^2 where the family has it."""
    yarn = rope.yarn
    correction = _mscale(yarn.factor, yarn.mscale_all_dim) if yarn is not None and yarn.mscale_all_dim else 1.0
    return 1.0 / math.sqrt(head_dim) * correction**2


def _read_width(c: Fields, head_dim: int, partial: bool) -> int:
    factors = (*_keys("partial_rotary_factor"), "partial_rotary_factor")
    if not partial:
        for key in factors:
            c.same(key, 1.0)
        return head_dim
    entries = c.maybe_whole("rotary_dim")
    factor = c.number(*factors, default=1.0 if entries else None)
    exact = entries or factor * head_dim
    keys = ("rotary_dim", *factors, "head_dim")
    if entries and any(c.stated(key) for key in factors):
        found = f"{entries} and partial_rotary_factor {factor:g} of head_dim {head_dim}"
        c.check(abs(factor * head_dim - entries) < 1e-6, keys, "rotary_dim", found, "one width from both")
    good = abs(round(exact) - exact) < 1e-6 and round(exact) % 2 == 0 and 0 < exact <= head_dim
    found = f"{exact:g} rotated entries of head_dim {head_dim}"
    c.check(good, keys, "rotary_dim" if entries else "partial_rotary_factor", found, "an even number within the head")
    return round(exact)


def _read_yarn(c: Fields, latent: bool) -> YarnSpec:
    factor = c.number(*_keys("factor"))
    original = c.whole(*_keys("original_max_position_embeddings"), "initial_context_length")
    mscale = c.maybe_number(*_keys("mscale"), zero=True)
    mscale_all_dim = c.maybe_number(*_keys("mscale_all_dim"), zero=True)
    attention_factor = c.maybe_number(*_keys("attention_factor"))
    if attention_factor is None:
        attention_factor = _mscale(factor, 1.0)
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / (_mscale(factor, mscale_all_dim) or 1.0)
    return YarnSpec(
        factor=factor,
        original_context=original,
        beta_fast=c.number(*_keys("beta_fast"), default=32.0),
        beta_slow=c.number(*_keys("beta_slow"), default=1.0),
        truncate=c.flag(*_keys("truncate"), default=True),
        attention_factor=attention_factor,
        mscale_all_dim=(mscale_all_dim or 0.0) if latent else 0.0,
    )


def _mscale(factor: float, mscale: float) -> float:
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1.0 else 1.0
