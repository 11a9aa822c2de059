"""The comparison of expert layers: all get the same weights, none is found in a cache, and the judge is awake."""

import argparse
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from muster.device import cpu, elsewhere
from muster.formats.codec import decode
from muster.formats.rounding import EXACT
from muster.formats.spec import FORMATS
from muster.lab.ledger.evidence import Verdict
from muster.lab.measure.floor import floor
from muster.lab.measure.peaks import Peaks
from muster.lab.prove.tolerance import rms
from muster.moe.backend import Routed
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.reference import expert_layer
from muster.moe.registry import backends

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

import contenders
from bench_gpu import Batch, Judge, arguments, described, joined, points
from contenders import Contender, hold, made_for, ours, theirs
from layers import SHAPES, copied, drawn, layer, problem
from peer import interleaved, padded, tensor_scale
from peer_humming import in_use
from peers import PEERS

CPU = torch.device("cpu")
PEAKS = Peaks(read_bandwidth=4e12, operations={"bf16": 8e14, "f32": 5e13})
SMALL = MoEProblem(64, 64, 8, RoutingRule(2), 8, weights=FORMATS["nvfp4"], dtype="f32")
H200_CACHE = 60 << 20


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(7)


class Computed:
    """A layer by the reference, with `fault` done to what it gives."""

    def __init__(self, weights, fault):
        self.weights, self.fault = weights, fault

    def call(self, x_TD, routed, out_TD):
        return lambda: out_TD.copy_(self.fault(expert_layer(SMALL, self.weights, x_TD, routed)))


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("shape", SHAPES)
def test_twice_the_cache_is_read_before_a_copy_is_used_again(shape: str, tokens: int) -> None:
    layout = problem(shape, "nvfp4")
    batch = Batch.of(layout, tokens, PEAKS, H200_CACHE, CPU)
    who = Contender("who", lambda weights: weights, EXACT)
    who.layers = [Turn(number) for number in range(batch.copies)]
    turns = batch.calls(who)
    bytes_read = [floor(layout, tokens, routed, PEAKS).weight_bytes for routed in batch.routings]
    last: dict[int, int] = {}
    for now, turn in enumerate([*turns, *turns]):
        if turn in last:
            between = sum(bytes_read[each % len(turns)] for each in range(last[turn] + 1, now))
            assert between >= 1.5 * H200_CACHE, (turn, now)
        last[turn] = now


class Turn:
    """Its call is its own number."""

    def __init__(self, number):
        self.number = number

    def call(self, x_TD, routed, out_TD):
        return self.number


def judged(fault) -> Verdict:
    weights = layer(SMALL, CPU)
    batch = Batch.of(SMALL, 12, PEAKS, 0, CPU)
    who = Contender("who", lambda weights: Computed(weights, fault), EXACT)
    hold([who], weights, 1, CPU)
    return Judge(SMALL, weights, batch).judge(who, batch.calls(who)[0])[0]


def test_the_judge_accepts_what_is_right() -> None:
    assert judged(lambda y: y) is Verdict.PROVEN


@pytest.mark.parametrize(
    "fault",
    [lambda y: y * 1.02, lambda y: y.roll(1, dims=0), lambda y: y.roll(1, dims=1), lambda y: torch.zeros_like(y)],
)
def test_the_judge_rejects_what_is_wrong(fault) -> None:
    assert judged(fault) is Verdict.WRONG


def test_the_judge_rejects_what_is_wrong_only_the_second_time() -> None:
    runs = iter([1.0, 1.5])
    assert judged(lambda y: y * next(runs)) is Verdict.WRONG


def test_the_judge_finds_what_was_not_written() -> None:
    assert judged(lambda y: y * torch.nan) is Verdict.NAN


def given(**more) -> argparse.Namespace:
    options = {"backends": ["torch", "cpu"], "peers": None, "tokens": [1, 9], "seconds": 0.001}
    return argparse.Namespace(**{**options, **more})


def test_every_backend_that_can_is_judged_and_timed_at_every_token_count() -> None:
    _, *several = points(SMALL, cpu(), PEAKS, given())
    able = [each.name for each in ours(SMALL, cpu(), ["torch", "cpu"])[0]]
    assert "torch" in able
    found = [(record["tokens"], record["backend"]) for point in several for record in point]
    assert found == [(tokens, name) for tokens in (1, 9) for name in able]
    for record in (record for point in several for record in point):
        assert record["verdict"] == "proven"
        assert record["cold"]
        assert record["share"] == pytest.approx(record["floor_microseconds"] / record["microseconds"])


def test_one_that_fails_leaves_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self, *given):
        raise RuntimeError("no\nsuch kernel")

    monkeypatch.setattr(type(backends().get("cpu")), "run", broken)
    _, point = points(SMALL, cpu(), PEAKS, given(tokens=[3]))
    words = {record["backend"]: record["verdict"] for record in point}
    assert words == {"cpu": "crash", "torch": "proven"}
    (why,) = [record["why"] for record in point if "why" in record]
    assert why == "RuntimeError: no such kernel"


def test_a_peer_that_is_not_here_says_so() -> None:
    able, declined = theirs(problem("30B", "nvfp4"), [1])
    assert able == []
    assert declined == {"vllm-marlin": "vllm cannot be imported", "humming": "humming cannot be imported"}
    assert theirs(problem("30B", "nvfp4"), [1], ["vllm-triton"]) == ([], {})
    assert "; " in theirs(problem("gpt-oss", "bf16"), [1])[1]["vllm-triton"]


def test_without_vllm_ours_run_alone_and_it_is_said_why(capsys: pytest.CaptureFixture[str]) -> None:
    with ExitStack() as stack:
        assert joined(stack, None) == []
    assert "no peers: ModuleNotFoundError: No module named 'vllm'" in capsys.readouterr().err


def test_on_a_hopper_every_backend_of_ours_for_gpus_takes_part() -> None:
    names = made_for(elsewhere("9.0"))
    assert {"decode", "triton", "triton_fused"} <= set(names)
    assert not {"torch", "cpu"} & set(names)
    able, declined = ours(problem("30B", "nvfp4"), elsewhere("9.0"))
    assert {each.name for each in able} | set(declined) == set(names)
    assert "decode" in {each.name for each in able}


def test_of_one_format_a_name_has_one_peer() -> None:
    pairs = [(peer.name, format) for peer in PEERS for format in peer.weights]
    assert len(pairs) == len(set(pairs))


def test_without_memory_all_get_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    several = [Contender(name, lambda weights: weights, EXACT) for name in "ab"]
    weights = layer(SMALL, CPU)
    hold(several, weights, 3, CPU)
    assert [len(each.layers) for each in several] == [3, 3]
    assert several[0].layers[1].down.codes.data_ptr() != weights.down.codes.data_ptr()
    monkeypatch.setattr(contenders, "ROOM", 1 << 60)
    few = [Contender(name, lambda weights: weights, EXACT) for name in "ab"]
    hold(few, weights, 3, CPU)
    assert [len(each.layers) for each in few] == [1, 1]


def test_copies_are_the_same_weights() -> None:
    weights = layer(SMALL, CPU)
    again = copied(weights)
    assert torch.equal(decode(again.gate_up), decode(weights.gate_up))
    assert torch.equal(decode(again.down), decode(weights.down))


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "fp8-block", "bf16"])
def test_drawn_weights_keep_activations_as_large_as_they_are(format: str) -> None:
    values = decode(drawn(2, 256, 256, FORMATS[format], 2, CPU))
    assert 0.3 < float(values.square().mean().sqrt()) * 256**0.5 < 3


def test_padding_changes_no_result() -> None:
    gpt_oss = replace(
        SMALL, weights=FORMATS["mxfp4"], activation=Activation("swiglu-oai", limit=7.0), bias=True, dtype="bf16"
    )
    weights = layer(gpt_oss, CPU)
    wide = padded(weights, 256, 128)
    assert (wide.gate_up.shape, wide.down.shape) == ((8, 256, 256), (8, 256, 128))
    x, routed = torch.randn(5, 64), Routed(torch.rand(5, 8).topk(2).indices, torch.rand(5, 2))
    found = expert_layer(gpt_oss, wide, torch.nn.functional.pad(x, (0, 192)), routed)
    assert rms(found[:, :64], expert_layer(gpt_oss, weights, x, routed))[1] < 1e-14
    assert not found[:, 64:].any()


def test_interleaved_rows_take_turns() -> None:
    rows = torch.arange(12).view(1, 6, 2)
    assert interleaved(rows)[0, :, 0].tolist() == [0, 6, 2, 8, 4, 10]


def test_one_tensor_scale_stands_for_both_pieces_or_for_none() -> None:
    matrix = layer(SMALL, CPU).gate_up
    assert torch.equal(tensor_scale(matrix), matrix.global_scale.value[:, 1])
    matrix.global_scale.value[3, 1] *= 2
    with pytest.raises(ValueError, match="gate and up"):
        tensor_scale(matrix)


def test_only_tile_sizes_in_use_are_compiled() -> None:
    sizes = [[0, 8, "a"], [8, 64, "b"], [64, 1 << 30, "c"]]
    assert in_use(sizes, [8, 100]) == [sizes[0], sizes[2]]


def test_a_line_names_the_ratio_to_the_fastest_peer_that_is_right() -> None:
    def one(name: str, microseconds: float, peer: bool, verdict: str = "proven") -> dict:
        constant = {"shape": "30B", "format": "nvfp4", "tokens": 4, "whole": 0.0, "cold": True}
        times = {"microseconds": microseconds, "floor_microseconds": 5.0, "share": 5 / microseconds}
        return {**constant, **times, "backend": name, "peer": peer, "verdict": verdict}

    ours, *_ = described([one("a", 10, False), one("b", 30, True), one("c", 15, True, "wrong"), one("d", 25, True)])
    assert ours.endswith("2.50x")


def test_arguments_that_name_nothing_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert arguments(["out.jsonl", "--peers", "none"]).peers == []
    assert arguments(["out.jsonl", "--tokens", "1,64"]).tokens == [1, 64]
    with pytest.raises(SystemExit):
        arguments(["out.jsonl", "--layers", "nvfp4:30B,nvfp4:31B"])
    assert "no nvfp4:31B; there are nvfp4:397B" in capsys.readouterr().err
