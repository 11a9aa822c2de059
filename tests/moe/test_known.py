"""What is known of other people's backends: it can never be run, and its facts say what was read."""

from dataclasses import replace

import pytest

from muster.contract import DISPATCHER, NO_ADAPTER, Known, in_order
from muster.device import COMPUTE_CAPABILITIES, Device, elsewhere
from muster.errors import UsageError
from muster.formats.spec import BF16, F32, FORMATS, FP8_BLOCK, MXFP4, NVFP4, Format
from muster.gemm import known as linears
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import linears as linear_registry
from muster.moe import known as experts
from muster.moe.problem import Activation, MoEProblem, RoutingRule
from muster.moe.registry import backends
from muster.moe.traps import TRAPS

EXPERTS = {entry.name: entry for entry in experts.BACKENDS}
LINEARS = {entry.name: entry for entry in linears.BACKENDS}
DISPATCHERS = {entry.name: entry for entry in experts.DISPATCHERS}


def layer(weights: Format = NVFP4, **fields: object) -> MoEProblem:
    plain = MoEProblem(hidden=4096, inner=1024, experts=128, routing=RoutingRule(8), local_experts=128, weights=weights)
    return replace(plain, **fields)


def linear(weights: Format, **fields: object) -> LinearProblem:
    return replace(LinearProblem(4096, 4096, weights, "bf16"), **fields)


def possible(entry: Known, problem: MoEProblem | LinearProblem, **options: bool) -> list[str]:
    return [key for key in COMPUTE_CAPABILITIES if not entry.obstacles(problem, elsewhere(key), **options)]


def test_names_are_unique() -> None:
    assert len(EXPERTS) == len(experts.BACKENDS)
    assert len(LINEARS) == len(linears.BACKENDS)
    assert len(DISPATCHERS) == len(experts.DISPATCHERS)


def test_no_name_is_a_registered_one() -> None:
    assert not EXPERTS.keys() & set(backends().names())
    assert not LINEARS.keys() & set(linear_registry().names())


@pytest.mark.parametrize("name", EXPERTS)
def test_a_known_backend_cannot_be_asked_for(name: str) -> None:
    with pytest.raises(UsageError, match=name):
        backends().get(name)


@pytest.mark.parametrize("key", COMPUTE_CAPABILITIES)
@pytest.mark.parametrize("weights", FORMATS.values(), ids=lambda weights: weights.name)
def test_a_known_backend_always_declines_and_says_that_it_has_no_adapter(key: str, weights: Format) -> None:
    device = elsewhere(key)
    declines = [entry.supports(layer(weights), device) for entry in (*experts.BACKENDS, *experts.DISPATCHERS)]
    declines += [entry.supports(linear(weights), device) for entry in linears.BACKENDS]
    assert all(decline.reasons[-1] == NO_ADAPTER for decline in declines)


def test_every_trap_is_of_a_known_backend_and_says_where_it_was_seen() -> None:
    assert TRAPS.keys() <= EXPERTS.keys() | DISPATCHERS.keys()
    traps = [trap for entry in (*EXPERTS.values(), *LINEARS.values(), *DISPATCHERS.values()) for trap in entry.traps]
    assert len(traps) > 50
    assert all(trap.what.endswith(".") and trap.source for trap in traps)


def test_every_backend_of_the_engines_is_here() -> None:
    wanted = "triton triton_kernel deep_gemm flashinfer_trtllm flashinfer_trtllm_routed flashinfer_cutlass"
    wanted += " flashinfer_mxfp4 flashinfer_cutedsl flashinfer_b12x cutlass marlin aiter humming hpc emulation"
    assert set(wanted.split()) <= EXPERTS.keys() | set(backends().names())
    wanted = "cutlass flashinfer_cutlass flashinfer_cudnn flashinfer_cutedsl flashinfer_trtllm flashinfer_b12x marlin"
    wanted += " deep_gemm flashinfer_deepgemm triton aiter cublas cutedsl"
    assert set(wanted.split()) <= LINEARS.keys() | set(linear_registry().names())


@pytest.mark.parametrize("name", ["flashinfer_trtllm", "flashinfer_trtllm_routed", "flashinfer_cutedsl"])
@pytest.mark.parametrize("key", ["9.0", "11.0", "12.0", "12.1"])
def test_kernels_of_the_data_centre_blackwell_run_nowhere_else(name: str, key: str) -> None:
    (reason,) = EXPERTS[name].obstacles(layer(), elsewhere(key))
    assert reason == f"runs on 10.0, 10.3, this is {key}"
    assert possible(EXPERTS[name], layer()) == ["10.0", "10.3"]


def test_b12x_runs_on_the_graphics_blackwell_only() -> None:
    assert possible(EXPERTS["flashinfer_b12x"], layer()) == ["12.0", "12.1"]
    assert possible(LINEARS["flashinfer_b12x"], linear(NVFP4)) == ["12.0", "12.1"]


def test_deep_gemm_runs_neither_on_12_0_nor_on_12_1() -> None:
    assert possible(EXPERTS["deep_gemm"], layer(FP8_BLOCK)) == ["9.0", "10.0", "10.3"]
    assert possible(LINEARS["deep_gemm"], linear(FP8_BLOCK)) == ["9.0", "10.0", "10.3"]


def test_on_an_h200_nvfp4_experts_are_multiplied_as_w4a16_or_emulated() -> None:
    able = [name for name, entry in EXPERTS.items() if not entry.obstacles(layer(), elsewhere("9.0"))]
    assert {"marlin", "humming"} <= set(able)
    assert not [name for name in able if name.startswith("flashinfer") or name == "cutlass"]


@pytest.mark.parametrize("name", ["marlin", "cutlass", "flashinfer_cutedsl", "flashinfer_mxfp4"])
def test_an_unquantised_draft_layer_is_refused_where_engines_replace_the_backend_in_silence(name: str) -> None:
    for key in COMPUTE_CAPABILITIES:
        reasons = EXPERTS[name].obstacles(layer(BF16), elsewhere(key), draft=True)
        assert any("these are bf16" in reason for reason in reasons)


def test_a_backend_with_a_draft_ban_is_refused_for_drafts_and_for_nothing_else() -> None:
    entry = EXPERTS["triton_unfused"]
    assert entry.draft_ban
    assert possible(entry, layer(MXFP4)) == ["9.0", "10.0", "10.3"]
    assert not possible(entry, layer(MXFP4), draft=True)
    assert entry.obstacles(layer(MXFP4), elsewhere("9.0"), draft=True) == (entry.draft_ban,)


@pytest.mark.parametrize("name", ["flashinfer_cutlass", "flashinfer_cutedsl", "cutlass"])
def test_an_nvfp4_layer_with_an_activation_limit_is_refused_where_engines_drop_it(name: str) -> None:
    limited = layer(activation=Activation("silu", limit=10.0))
    for key in COMPUTE_CAPABILITIES:
        reasons = EXPERTS[name].obstacles(limited, elsewhere(key))
        assert "takes no activation limit, the model has 10.0" in reasons


def test_cutlass_nvfp4_computes_silu_only() -> None:
    assert possible(EXPERTS["cutlass"], layer()) == ["10.0", "10.3", "11.0", "12.0", "12.1"]
    assert not possible(EXPERTS["cutlass"], layer(activation=Activation("gelu")))


def test_flashinfer_cutlass_refuses_the_widths_that_gave_garbage() -> None:
    reasons = EXPERTS["flashinfer_cutlass"].obstacles(layer(inner=1024 + 16), elsewhere("12.0"))
    assert reasons == ("needs inner % 32 == 0, found 1040 per rank",)


def test_a_router_inside_a_kernel_refuses_what_it_does_not_know() -> None:
    device = elsewhere("10.0")
    odd = replace(RoutingRule(8), scoring="sqrt-softplus")
    assert EXPERTS["flashinfer_trtllm"].obstacles(layer(routing=odd), device)
    assert not EXPERTS["flashinfer_trtllm_routed"].obstacles(layer(routing=odd), device)
    plain = replace(RoutingRule(8), renormalise=False)
    assert EXPERTS["flashinfer_trtllm"].obstacles(layer(BF16, routing=plain), device) == (
        "renormalises the weights of the chosen experts, the model does not",
    )
    sigmoid = replace(RoutingRule(8), scoring="sigmoid")
    assert EXPERTS["triton_kernel"].obstacles(layer(BF16, routing=sigmoid), device) == (
        "routes by softmax itself, the model by sigmoid",
    )


def test_experts_elsewhere_need_a_backend_that_can_skip_them() -> None:
    some = layer(local_experts=64)
    assert EXPERTS["cutlass"].obstacles(some, elsewhere("12.0")) == ("needs every expert on this rank",)
    assert not EXPERTS["marlin"].obstacles(some, elsewhere("12.0"))


def test_a_refusal_has_all_its_reasons_at_once() -> None:
    odd = layer(inner=1000, hidden=1000, activation=Activation("relu2"), bias=True, local_experts=64)
    reasons = EXPERTS["flashinfer_cutedsl"].obstacles(odd, elsewhere("9.0"))
    words = ("runs on", "knows silu", "biases", "hidden % 128", "inner % 128")
    assert len(reasons) == len(words)
    assert all(any(word in reason for reason in reasons) for word in words)


def test_weights_that_no_kernel_reads_are_refused_with_what_is_read() -> None:
    assert EXPERTS["marlin"].obstacles(layer(F32), elsewhere("9.0"))[-1] == (
        "reads fp8-block, fp8-channel, fp8-tensor, int4, mxfp4, nvfp4 weights, these are f32"
    )


def test_packages_count_on_this_machine_and_on_no_other() -> None:
    here = Device("12.0", "a card", 1, 1)
    missing = [reason for reason in EXPERTS["flashinfer_b12x"].obstacles(layer(), here) if "installed" in reason]
    assert missing
    assert EXPERTS["flashinfer_b12x"].obstacles(layer(), elsewhere("12.0")) == ()


def test_a_flashinfer_with_the_nan_regression_does_not_count() -> None:
    (path,) = [path for path in EXPERTS["flashinfer_trtllm"].paths if "nvfp4" in path.weights]
    (specifier,) = [package.versions for package in path.packages if package.name == "flashinfer-python"]
    assert "!=0.6.16.*" in specifier
    assert "!=0.6.17.*" in specifier


def test_linears_refuse_rows_that_do_not_fit() -> None:
    reasons = LINEARS["marlin"].obstacles(linear(NVFP4, rows=4096 + 16), elsewhere("9.0"))
    assert reasons == ("needs rows % 64 == 0, found 4112",)


def test_dispatchers_compute_nothing_and_take_every_format() -> None:
    assert all(entry.kind == DISPATCHER for entry in experts.DISPATCHERS)
    assert possible(DISPATCHERS["deepep"], layer()) == ["9.0", "10.0", "10.3"]


def test_device_keys_are_listed_by_number() -> None:
    assert in_order({"12.0", "8.0", "gfx942", "cpu", "10.0"}) == "8.0, 10.0, 12.0, cpu, gfx942"


def test_an_unknown_compute_capability_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"'7\.0'.*8\.0, 8\.6"):
        elsewhere("7.0")
