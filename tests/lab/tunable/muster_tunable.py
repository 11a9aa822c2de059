"""A backend that takes its tile sizes from the tables, on a processor: blocks of 32 rows are by far its fastest."""

import os
import time
from dataclasses import dataclass

from muster import env
from muster.device import cpu
from muster.moe.backend import Facts, FusedFunc
from muster.moe.kernels.triton_tiles import SMALLEST_SHARED, Target
from muster.moe.kernels.tuning import Cuts, tunings
from muster.moe.problem import MoEProblem
from muster.moe.reference import expert_layer
from muster.moe.registry import register_fused_func
from muster.moe.weights import ExpertWeights

KERNELS = "tunable"


@dataclass(frozen=True, eq=False)
class Held:
    problem: MoEProblem
    weights: ExpertWeights
    cuts: Cuts
    nbytes: int = 0


@register_fused_func("tunable")
class Tunable(FusedFunc[Held]):
    """The reference, slower than need be, and with MUTANT set wrong at its fastest."""

    facts = Facts(
        devices=frozenset({"cpu"}),
        weights=frozenset({"bf16"}),
        dtypes=frozenset({"f32"}),
        activations=frozenset({"silu"}),
        zero_tokens=True,
        sentinel_ids=True,
        tiles=KERNELS,
    )

    def prepare(self, problem, weights):
        known = (one for one in tunings(cpu().name, env.read().home) if one.fits(KERNELS, problem))
        return Held(
            problem, weights, Cuts(problem, Target(KERNELS, problem.weights, "", SMALLEST_SHARED), tuple(known))
        )

    def run(self, prepared, x_TD, routed, out_TD, workspace):
        fast = prepared.cuts.tiles(routed.ids_TK.numel()).rows == 32
        time.sleep(0.0 if fast else 0.01)
        out_TD.copy_(expert_layer(prepared.problem, prepared.weights, x_TD, routed))
        if fast and os.environ.get("MUTANT"):
            out_TD *= 1.02
