"""Backends that name one layout may be handed each other's weights: whoever prepares them, they are the same."""

from dataclasses import fields, is_dataclass
from itertools import combinations

import pytest
import torch

pytest.importorskip("triton")

from muster.formats.spec import BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, MXFP4, NVFP4, int4
from muster.moe.registry import backends

from .cases import Case, build, problem

FORMATS = (BF16, FP8_BLOCK, FP8_CHANNEL, FP8_TENSOR, NVFP4, MXFP4, int4(32))
SHARING = [
    pytest.param(one, other, format, id=f"{one}, {other}, {format.name}")
    for (one, first), (other, second) in combinations(backends(), 2)
    if first.facts.layout and first.facts.layout == second.facts.layout
    for format in FORMATS
    if format.family in first.facts.weights & second.facts.weights
]


def same(one, other):
    """Whether all that two prepared layers hold is equal, to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))
    if is_dataclass(one):
        return all(same(getattr(one, field.name), getattr(other, field.name)) for field in fields(one))
    return one == other


@pytest.mark.parametrize(("one", "other", "format"), SHARING)
def test_a_shared_layout_is_the_same_whoever_made_it(one, other, format):
    given = problem(256, 256, experts=2, weights=format, dtype="bf16")
    weights = build(Case(given, tokens=1), 1).weights
    assert same(*(backends().get(name).prepare(given, weights) for name in (one, other)))
