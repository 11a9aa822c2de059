"""The judge: is what a backend computed what it should have computed?

Two float64 references. *As computed* follows the rounding points that the backend declares and decides; *ideal* rounds
nothing and is reported. Two numbers decide, both relative RMS: of the whole output, and of the worst token. Limits are
three times what correct kernels show over many draws (`results/limits.jsonl`, made by `scripts/limits.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from muster.formats.rounding import EXACT, Grid, Rounding
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears
from muster.lab.ledger.evidence import Errors, Verdict
from muster.lab.prove.cases import Case, Inputs, reference
from muster.lab.prove.parts import Problem
from muster.moe.backend import RunnerCore
from muster.moe.registry import backends

SETTLED = 16
"""Tokens from which on one token's noise no longer shows in the whole output."""
CEILING = 0.016
"""No output may be off by more as a whole, however few tokens: an error of 2 % everywhere must show."""

_PIECE = 1 << 18
"""Elements that are compared at a time."""


@dataclass(frozen=True)
class Limit:
    """The largest relative RMS error that passes.

    Attributes:
        whole: over an output of many tokens.
        worst_token: of any token.
    """

    whole: float
    worst_token: float

    def of(self, tokens: int) -> Limit:
        """For an output of that many tokens: the fewer they are, the more the noise of one counts in the whole."""
        widened = self.whole * math.sqrt(max(1.0, SETTLED / max(tokens, 1)))
        return replace(self, whole=min(widened, max(self.whole, min(self.worst_token, CEILING))))


LIMITS: Mapping[str, Limit] = MappingProxyType(
    {
        "f32": Limit(5.0e-6, 7.8e-6),
        "f16": Limit(6.2e-4, 2.0e-3),
        "bf16": Limit(2.9e-3, 1.2e-2),
        "fp8": Limit(1.5e-2, 8.6e-2),
        "nvfp4": Limit(8.2e-3, 1.1e-1),
    }
)
"""By the coarsest grid that anything is rounded to, the output's dtype included; from fine to coarse."""

_GRADES = {
    Grid.BF16: "bf16",
    Grid.F16: "f16",
    Grid.FP8_TENSOR: "fp8",
    Grid.FP8_TOKEN: "fp8",
    Grid.FP8_GROUP: "fp8",
    Grid.MXFP8: "fp8",
    Grid.FP8_EIGHTH: "fp8",
    Grid.NVFP4: "nvfp4",
}


def judge(found: Tensor, case: Case, inputs: Inputs, backend: str) -> tuple[Verdict, Errors]:
    """PROVEN, WRONG or NAN, from the values of an output alone, and how far off they are.

    Args:
        found: what the backend wrote, `[T, D]` or `[T, N]` in the problem's dtype.
        case: what it was asked.
        inputs: the case's tensors, on the device of `found`.
        backend: its name; says where it rounds.
    """
    return weigh(found, case, inputs, rounding_of(backend, case.part.problem))


def weigh(found: Tensor, case: Case, inputs: Inputs, rounding: Rounding) -> tuple[Verdict, Errors]:
    """`judge` for a kernel whose rounding is given."""
    ideal = reference(case, inputs)
    computed = ideal if rounding == EXACT else reference(case, inputs, rounding)
    return decide(found, computed, ideal, LIMITS[grade(rounding, case.part.problem.dtype)].of(case.tokens))


def decide(found: Tensor, computed: Tensor, ideal: Tensor, limit: Limit) -> tuple[Verdict, Errors]:
    """The verdict on an output, given both references, float64 and not yet rounded to its dtype."""
    rounded = computed.to(found.dtype)
    whole, worst = rms(found, rounded)
    ideal_whole, ideal_worst = rms(found, ideal)
    errors = Errors(whole, worst, ideal_whole, ideal_worst, limit.whole, limit.worst_token)
    if math.isinf(whole) and bool((rounded.isfinite() & ~found.isfinite()).any()):
        return Verdict.NAN, errors
    return (Verdict.PROVEN if whole <= limit.whole and worst <= limit.worst_token else Verdict.WRONG), errors


def grade(rounding: Rounding, dtype: str) -> str:
    """The row of `LIMITS` for kernels with that rounding and that dtype in and out."""
    return max((dtype, *(_GRADES[grid] for grid in rounding.grids)), key=list(LIMITS).index)


def rounding_of(backend: str, problem: Problem) -> Rounding:
    """Where a backend rounds: as it declares, and where a runner core's rows pass through the problem's dtype."""
    if isinstance(problem, LinearProblem):
        return linears().get(backend).facts.rounding
    entry = backends().get(backend)
    rounding = entry.facts.rounding
    if problem.dtype == "f32" or not isinstance(entry, RunnerCore):
        return rounding
    own = Grid(problem.dtype)
    if rounding.rows is Grid.NONE:
        rounding = replace(rounding, rows=own)
    if problem.router_weight_on_input and rounding.input is Grid.NONE:
        rounding = replace(rounding, input=own)
    return rounding


def rms(found: Tensor, truth: Tensor) -> tuple[float, float]:
    """Relative RMS error over everything, and of the token where it is worst.

    A token's error is measured against its own size or that of the typical token, whichever is larger: neither one
    that nearly cancels nor one that dwarfs the others decides. The typical token is the median of those that are not
    zero; where all are zero, so must the output be.

    Args:
        found: `[T, N]`.
        truth: `[T, N]`; where it is infinite `found` must be the same.

    Returns:
        Infinity for both where anything else is not finite; zeros where there are no elements.
    """
    if not truth.numel():
        return 0.0, 0.0
    # In pieces that stay in the cache: a prefill of a whole vocabulary has gigabytes of float64 in passing.
    rows = max(_PIECE // truth.shape[-1], 1)
    pieces = [_sizes(*pair) for pair in zip(torch.split(found, rows), torch.split(truth, rows), strict=True)]
    off_T, sizes_T = (torch.cat(several) for several in zip(*pieces, strict=True))
    if not off_T.isfinite().all():
        return math.inf, math.inf
    present = sizes_T[sizes_T > 0]
    typical = float(present.median()) if len(present) else 0.0
    tiny = torch.finfo(torch.float64).tiny
    whole = float(off_T.square().mean().sqrt() / sizes_T.square().mean().sqrt().clamp_min(tiny))
    return whole, float((off_T / sizes_T.clamp_min(max(typical, tiny))).max())


def _sizes(found: Tensor, truth: Tensor) -> tuple[Tensor, Tensor]:
    """RMS `[T]` of each token's error, not finite where anything in it is not, and of its truth."""
    found, truth = found.double(), truth.double()
    error = torch.where(found == truth, 0.0, found - truth)
    truth = torch.where(truth.isfinite(), truth, 0.0)
    return error.square().mean(-1).sqrt(), truth.square().mean(-1).sqrt()
