"""Deliberate bugs: what the judge must reject. Each is of a kind that kernels have had, put into one that is right.

A limit earns trust by what it rejects: `tests/lab/test_mutants.py` shows every mutant rejected on every case that it
applies to, and correct backends accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from muster.device import DTYPES
from muster.formats.codec import decode
from muster.formats.matrix import QuantMatrix
from muster.formats.rounding import Grid, Rounding, round_to
from muster.formats.spec import Element
from muster.lab.prove import miscoded, misrouted
from muster.lab.prove.cases import Case, ExpertInputs, Inputs, LinearInputs, reference
from muster.lab.prove.miscoded import Misread
from muster.lab.prove.misrouted import Misroute, MisrouteRow
from muster.moe.problem import ActivationName, MoEProblem
from muster.moe.weights import ExpertWeights


@dataclass(frozen=True, eq=False)
class Kernel:
    """A kernel that is right, on one case.

    Attributes:
        case: what it computes.
        inputs: the case's tensors.
        rounding: where it rounds.
    """

    case: Case
    inputs: Inputs
    rounding: Rounding

    def answer(self) -> Tensor:
        """Its output, `[T, D]` or `[T, N]` in the problem's dtype."""
        return reference(self.case, self.inputs, self.rounding).to(DTYPES[self.case.part.problem.dtype])

    @property
    def experts(self) -> tuple[MoEProblem, ExpertInputs] | None:
        """What it computes of an expert layer; None for a linear."""
        if isinstance(self.case.part.problem, MoEProblem) and isinstance(self.inputs, ExpertInputs):
            return self.case.part.problem, self.inputs
        return None

    @property
    def matrices(self) -> tuple[QuantMatrix, ...]:
        """All that it reads."""
        if isinstance(self.inputs, LinearInputs):
            return (self.inputs.matrix,)
        return self.inputs.weights.gate_up, self.inputs.weights.down

    @cached_property
    def live(self) -> tuple[int, ...]:
        """Tokens that it computes something for: not blank, and with an expert on this rank."""
        if isinstance(self.inputs, LinearInputs):
            busy_T = (self.inputs.x_TK != 0).any(-1)
        else:
            assert isinstance(self.case.part.problem, MoEProblem)
            here_TK = misrouted.here(self.case.part.problem, self.inputs.routed)
            busy_T = (self.inputs.x_TD != 0).any(-1) & here_TK.any(-1)
        return tuple(int(token) for token in busy_T.nonzero())

    def on_tokens(self, change: Callable[[Tensor], Tensor]) -> Kernel:
        """The same kernel on other tokens."""
        if isinstance(self.inputs, LinearInputs):
            return replace(self, inputs=replace(self.inputs, x_TK=change(self.inputs.x_TK)))
        return replace(self, inputs=replace(self.inputs, x_TD=change(self.inputs.x_TD)))

    def on_matrices(self, change: Misread) -> Kernel:
        """The same kernel on other matrices."""
        if isinstance(self.inputs, LinearInputs):
            return replace(self, inputs=replace(self.inputs, matrix=change(self.inputs.matrix)))
        weights = self.inputs.weights
        changed = replace(weights, gate_up=change(weights.gate_up), down=change(weights.down))
        return replace(self, inputs=replace(self.inputs, weights=changed))

    def rounding_at(self, **points: Grid) -> Kernel:
        """The same kernel with other rounding points."""
        return replace(self, rounding=replace(self.rounding, **points))


Compute = Callable[[Kernel], Tensor]
Applies = Callable[[Kernel], bool]


def computes(kernel: Kernel) -> bool:
    """Something is computed at all."""
    return bool(kernel.live)


@dataclass(frozen=True)
class Mutant:
    """A bug.

    Attributes:
        name: what goes wrong.
        compute: the output of a kernel that would be right without the bug.
        applies: whether the bug changes anything there.
    """

    name: str
    compute: Compute
    applies: Applies = computes


def _has_tokens(kernel: Kernel) -> bool:
    return kernel.case.tokens > 0


def _has_neighbours(kernel: Kernel) -> bool:
    return kernel.case.tokens > 1 and bool(kernel.live)


def _is_linear(kernel: Kernel) -> bool:
    return isinstance(kernel.inputs, LinearInputs) and bool(kernel.live)


def _filled(rows: slice, columns: slice, value: float) -> Compute:
    def compute(kernel: Kernel) -> Tensor:
        out = kernel.answer()
        out[rows, columns] = value
        return out

    return compute


def _two_swapped(kernel: Kernel) -> Tensor:
    out, token = kernel.answer(), kernel.live[-1]
    other = token - 1 if token else 1
    out[[token, other]] = out[[other, token]]
    return out


def _as_the_one_before(kernel: Kernel) -> Tensor:
    out, token = kernel.answer(), kernel.live[-1]
    out[token] = out[token - 1]
    return out


def _left_over(kernel: Kernel) -> Tensor:
    out, token = kernel.answer(), kernel.live[-1]
    out[token] = kernel.on_tokens(lambda x: x.flip(-1)).answer()[token]
    return out


def _sum_in_bf16(kernel: Kernel) -> Tensor:
    """Partial sums are kept in bf16 from one matrix instruction to the next."""
    inputs, step = kernel.inputs, miscoded.MMA_COLUMNS
    assert isinstance(inputs, LinearInputs)
    x_TK, weight_NK = inputs.x_TK.double(), decode(inputs.matrix, torch.float64)
    total_TN = torch.zeros(len(x_TK), len(weight_NK), dtype=torch.float64)
    for x, weight in zip(torch.split(x_TK, step, -1), torch.split(weight_NK, step, -1), strict=True):
        total_TN = round_to(total_TN + x @ weight.T, Grid.BF16)
    bias_N = 0.0 if inputs.bias is None else inputs.bias.double()
    return (total_TN + bias_N).to(inputs.x_TK.dtype)


def _bias_omitted(kernel: Kernel) -> Tensor:
    assert isinstance(kernel.inputs, LinearInputs)
    return replace(kernel, inputs=replace(kernel.inputs, bias=None)).answer()


def _misread(name: str, misread: Misread, fits: Callable[[QuantMatrix], bool]) -> Mutant:
    """A bug in how stored matrices are read; every one that it fits is read wrongly."""

    def where_it_fits(matrix: QuantMatrix) -> QuantMatrix:
        return misread(matrix) if fits(matrix) else matrix

    return Mutant(
        name,
        lambda kernel: kernel.on_matrices(where_it_fits).answer(),
        lambda kernel: bool(kernel.live) and any(fits(matrix) for matrix in kernel.matrices),
    )


def _misrouted(name: str, misroute: Misroute, fits: Callable[[MoEProblem], bool]) -> Mutant:
    """A bug in which expert computes what, and with which weight."""

    def compute(problem: MoEProblem, inputs: ExpertInputs, kernel: Kernel) -> Kernel:
        return replace(kernel, inputs=replace(inputs, routed=misroute(problem, inputs.routed)))

    return _of_experts(name, compute, fits)


def _row_misrouted(name: str, misroute: MisrouteRow, fits: Callable[[MoEProblem], bool]) -> Mutant:
    """The same, for a single row of the last token that something is computed for."""

    def compute(problem: MoEProblem, inputs: ExpertInputs, kernel: Kernel) -> Kernel:
        return replace(kernel, inputs=replace(inputs, routed=misroute(problem, inputs.routed, kernel.live[-1])))

    return _of_experts(name, compute, fits)


def _misweighted(
    name: str, change: Callable[[MoEProblem, ExpertWeights], ExpertWeights], fits: Callable[[MoEProblem], bool]
) -> Mutant:
    """A bug in which of an expert's weights are used for what."""

    def compute(problem: MoEProblem, inputs: ExpertInputs, kernel: Kernel) -> Kernel:
        return replace(kernel, inputs=replace(inputs, weights=change(problem, inputs.weights)))

    return _of_experts(name, compute, fits)


def _misunderstood(name: str, change: Callable[[MoEProblem], MoEProblem], fits: Callable[[MoEProblem], bool]) -> Mutant:
    """A bug in what the experts compute: that of another problem."""

    def compute(problem: MoEProblem, _: ExpertInputs, kernel: Kernel) -> Kernel:
        case = kernel.case
        return replace(kernel, case=replace(case, part=replace(case.part, problem=change(problem))))

    return _of_experts(name, compute, fits)


def _of_experts(
    name: str, change: Callable[[MoEProblem, ExpertInputs, Kernel], Kernel], fits: Callable[[MoEProblem], bool]
) -> Mutant:
    def compute(kernel: Kernel) -> Tensor:
        assert kernel.experts is not None
        return change(*kernel.experts, kernel).answer()

    def applies(kernel: Kernel) -> bool:
        return kernel.experts is not None and fits(kernel.experts[0]) and bool(kernel.live)

    return Mutant(name, compute, applies)


def _has_sentinels(kernel: Kernel) -> bool:
    if kernel.experts is None:
        return False
    problem, inputs = kernel.experts
    ids_TK = inputs.routed.ids_TK
    return bool(((ids_TK < 0) | (ids_TK >= problem.experts)).any())


def _halves_swapped(problem: MoEProblem, weights: ExpertWeights) -> ExpertWeights:
    gate_up = QuantMatrix.plain(decode(weights.gate_up).roll(problem.inner, 1))
    bias = None if weights.gate_up_bias is None else weights.gate_up_bias.roll(problem.inner, 1)
    return replace(weights, gate_up=gate_up, gate_up_bias=bias)


def _taken_to_alternate(_: MoEProblem, weights: ExpertWeights) -> ExpertWeights:
    rows = decode(weights.gate_up)
    return replace(weights, gate_up=QuantMatrix.plain(torch.cat((rows[:, 0::2], rows[:, 1::2]), 1)))


def _bias_halves_swapped(problem: MoEProblem, weights: ExpertWeights) -> ExpertWeights:
    assert weights.gate_up_bias is not None
    return replace(weights, gate_up_bias=weights.gate_up_bias.roll(problem.inner, 1))


def _without_first_bias(_: MoEProblem, weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, gate_up_bias=None)


def _without_second_bias(_: MoEProblem, weights: ExpertWeights) -> ExpertWeights:
    return replace(weights, down_bias=None)


def _other_activation(problem: MoEProblem) -> MoEProblem:
    name: ActivationName = "silu" if problem.activation.name != "silu" else "gelu"
    return replace(problem, activation=replace(problem.activation, name=name))


def _without_limit(problem: MoEProblem) -> MoEProblem:
    return replace(problem, activation=replace(problem.activation, limit=None))


def _slope_of_one(problem: MoEProblem) -> MoEProblem:
    return replace(problem, activation=replace(problem.activation, alpha=1.0))


def _other_side(problem: MoEProblem) -> MoEProblem:
    return replace(problem, router_weight_on_input=not problem.router_weight_on_input)


def _always(_: object) -> bool:
    return True


def _gated(problem: MoEProblem) -> bool:
    return problem.activation.gated


def _biased(problem: MoEProblem) -> bool:
    return problem.bias


def _weighted(problem: MoEProblem) -> bool:
    """Whether routing weights are other than one."""
    rule = problem.routing
    return rule.top_k > 1 or not rule.renormalise or rule.scaling_factor != 1.0


def _several_experts(problem: MoEProblem) -> bool:
    return problem.local_experts > 1


def _of(*elements: Element) -> Callable[[QuantMatrix], bool]:
    return lambda matrix: matrix.format.element in elements


def _scaled_by(*elements: Element) -> Callable[[QuantMatrix], bool]:
    return lambda matrix: matrix.scale is not None and matrix.scale.element in elements


_INVERTIBLE = (Element.E4M3, Element.F32, Element.BF16, Element.F16)

MUTANTS: tuple[Mutant, ...] = (
    Mutant("everything times 1.02", lambda kernel: kernel.answer() * 1.02),
    Mutant("everything negated", lambda kernel: -kernel.answer()),
    Mutant("columns out by one", lambda kernel: kernel.answer().roll(1, -1)),
    Mutant("two tokens swapped", _two_swapped, _has_neighbours),
    Mutant("a token has the result of the one before", _as_the_one_before, _has_neighbours),
    Mutant("a row is left over from an earlier call", _left_over),
    Mutant("a column is NaN", _filled(slice(None), slice(5, 6), torch.nan), _has_tokens),
    Mutant("a value is infinite", _filled(slice(0, 1), slice(3, 4), torch.inf), _has_tokens),
    Mutant("the last row is not written", _filled(slice(-1, None), slice(None), torch.nan), _has_tokens),
    Mutant("the last columns are nought", _filled(slice(None), slice(-miscoded.MMA_COLUMNS, None), 0.0)),
    Mutant(
        "blank tokens are divided by their size",
        _filled(slice(None, -1, 3), slice(None), torch.nan),
        lambda kernel: kernel.case.pattern == "blank",
    ),
    Mutant(
        "tokens are rounded unannounced",
        lambda kernel: kernel.rounding_at(input=Grid.BF16).answer(),
        lambda kernel: kernel.case.part.problem.dtype == "f32" and bool(kernel.live),
    ),
    Mutant(
        "inner vectors are quantised unannounced",
        lambda kernel: kernel.rounding_at(inner=Grid.FP8_TOKEN).answer(),
        lambda kernel: bool(
            kernel.experts and kernel.live and not kernel.rounding.grids - {Grid.NONE, Grid.BF16, Grid.F16}
        ),
    ),
    Mutant(
        "a long sum is kept in bf16",
        _sum_in_bf16,
        lambda kernel: _is_linear(kernel) and kernel.matrices[0].shape[1] >= 1024 and not kernel.rounding.grids,
    ),
    Mutant(
        "a linear's bias is omitted",
        _bias_omitted,
        lambda kernel: isinstance(kernel.inputs, LinearInputs) and kernel.inputs.bias is not None,
    ),
    _misread("the tail of K is skipped", miscoded.tail_skipped, _always),
    _misread("weight rows are out by one", miscoded.rows_one_on, _always),
    _misread("block scales are out by one block", miscoded.scales_one_block_on, miscoded.has_blocks_along_k),
    _misread("block scales are out by one row", miscoded.scales_one_row_on, miscoded.has_blocks_along_n),
    _misread("block scales are read transposed", miscoded.scales_transposed, miscoded.has_block_grid),
    _misread("block scales are applied twice", miscoded.scales_twice, lambda matrix: matrix.format.quantised),
    _misread("a scale is inverted", miscoded.largest_scale_inverted, _scaled_by(*_INVERTIBLE)),
    _misread("the first piece's tensor scale is used for all", miscoded.first_piece_for_all, miscoded.has_pieces),
    _misread("tensor scales are omitted", miscoded.tensor_scale_omitted, lambda matrix: matrix.format.global_scale),
    _misread("nibbles are swapped", miscoded.nibbles_swapped, _of(Element.E2M1, Element.UINT4)),
    _misread("the sign of e2m1 is lost", miscoded.sign_lost, _of(Element.E2M1)),
    _misread("e2m1's half is flushed to nought", miscoded.halves_flushed, _of(Element.E2M1)),
    _misread("e8m0 exponents are one too large", miscoded.exponents_one_up, _scaled_by(Element.E8M0)),
    _misread("e4m3fn is read as e4m3fnuz", miscoded.other_e4m3, _of(Element.E4M3)),
    _misread("int4 zero points are ignored", miscoded.zero_points_ignored, _of(Element.UINT4)),
    _misread("int4 zero points are one too large", miscoded.zero_points_one_up, _of(Element.UINT4)),
    _misread("the order of columns is ignored", miscoded.order_ignored, lambda matrix: matrix.order is not None),
    _row_misrouted("the last expert of a token is dropped", misrouted.last_expert_dropped, _always),
    _row_misrouted("a row is added twice", misrouted.slot_added_twice, _always),
    _row_misrouted("a row at a tile's edge goes to the next expert", misrouted.row_to_next_expert, _several_experts),
    _misrouted("expert ids are out by one", misrouted.ids_one_up, _several_experts),
    replace(
        _misrouted("a sentinel is taken for an expert", misrouted.sentinel_is_first, _always), applies=_has_sentinels
    ),
    _misrouted(
        "other ranks' experts are computed here", misrouted.others_taken_in, lambda p: p.local_experts < p.experts
    ),
    _misrouted("routing weights are omitted", misrouted.weights_omitted, _weighted),
    _misrouted("routing weights are applied twice", misrouted.weights_twice, _weighted),
    _misrouted("routing weights are not renormalised", misrouted.not_renormalised, _always),
    _misrouted("routing weights are in another slot", misrouted.weights_by_other_slot, lambda p: p.routing.top_k > 1),
    _misrouted(
        "the scaling factor is applied twice", misrouted.scaled_twice, lambda p: p.routing.scaling_factor != 1.0
    ),
    _misunderstood("routing weights are on the wrong side", _other_side, _weighted),
    _misunderstood("the activation is another", _other_activation, _gated),
    _misunderstood("the activation's limit is omitted", _without_limit, lambda p: p.activation.limit is not None),
    _misunderstood("the activation's slope is one", _slope_of_one, lambda p: p.activation.name == "swiglu-oai"),
    _misweighted("gate and up are swapped", _halves_swapped, _gated),
    _misweighted("gate and up rows are taken to alternate", _taken_to_alternate, _gated),
    _misweighted("gate's bias and up's are swapped", _bias_halves_swapped, lambda p: p.bias and p.activation.gated),
    _misweighted("the first bias is omitted", _without_first_bias, _biased),
    _misweighted("the second bias is omitted", _without_second_bias, _biased),
)
