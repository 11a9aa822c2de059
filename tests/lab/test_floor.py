"""The floor: bytes and operations counted exactly for routings that are known, and the longer of the two times."""

import dataclasses

import pytest
import torch

from muster.formats.spec import BF16, FORMATS, FP8_BLOCK, NVFP4, Format
from muster.gemm.problem import LinearProblem
from muster.lab.measure.floor import Floor, floor
from muster.lab.measure.peaks import Peaks
from muster.lab.prove.cases import Case, Part, Role, build
from muster.lab.prove.inputs import ExpertInputs, LinearInputs
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule

PEAKS = Peaks(read_bandwidth=1e9, operations={"f32": 1e12})
PROBLEM = MoEProblem(
    hidden=64, inner=32, experts=8, routing=RoutingRule(2), local_experts=8, weights=NVFP4, dtype="f32"
)
EXPERT = (64 * 64 + 64 * 32) // 2 + (64 * 4 + 64 * 2) + 8 + 4
"""Codes of both matrices, their block scales, and the tensor scales of gate, up and down."""
SLOT_OPERATIONS = 2 * (64 * 64 + 64 * 32)


def routed(*ids: tuple[int, int]) -> Routed:
    return Routed(torch.tensor(ids).reshape(-1, 2), torch.full((len(ids), 2), 0.5))


@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([(0, 1)], 2),
        ([(0, 1), (1, 0), (0, 1)], 2),
        ([(0, 1), (2, 3), (4, 5), (6, 7)], 8),
        ([(3, 3)], 1),
    ],
)
def test_weight_bytes_are_those_of_distinct_experts(ids: list[tuple[int, int]], experts: int) -> None:
    found = floor(PROBLEM, len(ids), routed(*ids), PEAKS)
    assert found.weight_bytes == experts * EXPERT
    assert found.operations == 2 * len(ids) * SLOT_OPERATIONS
    assert found.activation_bytes == 2 * len(ids) * 64 * 4 + 2 * len(ids) * 12


def test_experts_elsewhere_and_sentinels_cost_nothing() -> None:
    rank = dataclasses.replace(PROBLEM, local_experts=4, first_expert=4)
    found = floor(rank, 3, routed((4, 5), (0, 5), (1, -1)), PEAKS)
    assert found.weight_bytes == 2 * EXPERT
    assert found.operations == 3 * SLOT_OPERATIONS
    assert found.activation_bytes == (2 + 3) * 64 * 4 + 6 * 12, "tokens that no expert here takes are not read"


def test_no_tokens_cost_nothing() -> None:
    found = floor(PROBLEM, 0, Routed(torch.empty(0, 2, dtype=torch.int64), torch.empty(0, 2)), PEAKS)
    assert (found.bytes_read, found.operations, found.seconds) == (0, 0, 0.0)


@pytest.mark.parametrize("format", FORMATS.values(), ids=lambda format: format.name)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
def test_bytes_of_an_expert_are_what_the_loader_holds(format: Format, bias: bool) -> None:
    problem = MoEProblem(256, 128, 2, RoutingRule(2), local_experts=2, weights=format, dtype="f32", bias=bias)
    inputs = build(Case(Part(Role.EXPERTS, problem, "", 1), 1, "uniform", 0), torch.device("cpu"))
    assert isinstance(inputs, ExpertInputs)
    matrices = (inputs.weights.gate_up, inputs.weights.down)
    held = [tensor for matrix in matrices for name, tensor in matrix.tensors.items() if name != "input_scale"]
    biases = 2 * 2 * (256 + 256) if bias else 0
    a_scale_per_piece = 2 * 4 if format.name == "fp8-tensor" else 0
    found = floor(problem, 1, routed((0, 1)), PEAKS)
    assert found.weight_bytes == sum(tensor.nbytes for tensor in held) + biases - a_scale_per_piece


def test_a_part_without_a_gate_has_one_first_matrix() -> None:
    plain = dataclasses.replace(PROBLEM, weights=BF16, activation=Activation("relu2"))
    assert floor(plain, 1, routed((0, 0)), PEAKS).weight_bytes == 2 * 64 * 32 * 2


@pytest.mark.parametrize("format", [BF16, NVFP4, FP8_BLOCK], ids=lambda format: format.name)
def test_a_linear_reads_its_matrix_once(format: Format) -> None:
    problem = LinearProblem(rows=256, columns=128, weights=format, dtype="f32")
    inputs = build(Case(Part(Role.LINEARS, problem, "", 1), 3, "dense", 0), torch.device("cpu"))
    assert isinstance(inputs, LinearInputs)
    found = floor(problem, 3, None, PEAKS)
    held = [tensor for name, tensor in inputs.matrix.tensors.items() if name != "input_scale"]
    further_pieces = inputs.matrix.tensors["global_scale"].numel() - 1 if format.global_scale else 0
    assert found.weight_bytes == sum(tensor.nbytes for tensor in held) - 4 * further_pieces
    assert found.activation_bytes == 3 * (256 + 128) * 4
    assert found.operations == 2 * 3 * 256 * 128


def test_the_floor_is_the_longer_of_bytes_and_operations() -> None:
    assert Floor(800, 200, 10, bandwidth=1000.0, rate=1000.0).seconds == 1.0
    assert Floor(800, 200, 5000, bandwidth=1000.0, rate=1000.0).seconds == 5.0
    assert Floor(800, 200, 5000, bandwidth=1000.0, rate=None).seconds == 1.0
    assert Floor(800, 200, 10, bandwidth=1000.0, rate=None).share(4.0) == 0.25


def test_other_peaks_change_the_time_and_nothing_else() -> None:
    slow = floor(PROBLEM, 1, routed((0, 1)), PEAKS)
    fast = slow.under(Peaks(2e9, {}), PROBLEM)
    assert fast.seconds == slow.bytes_read / 2e9
    assert (fast.bytes_read, fast.operations, fast.rate) == (slow.bytes_read, slow.operations, None)
