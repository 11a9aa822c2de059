"""Limits of decode and prefill: published figures reproduced, and what must hold for every model and machine."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from muster.checkpoint.inventory import Inventory
from muster.errors import UsageError
from muster.lab.explain.changes import changes
from muster.lab.explain.gpus import GPUS, gpu
from muster.lab.explain.limit import Bound, Limit, limit, message_time, usable_rate
from muster.lab.explain.machine import machines
from muster.lab.explain.roofline import Roofline
from muster.lab.explain.speculation import Speculation, speculation
from muster.lab.explain.split import Split
from muster.lab.explain.traffic import Component, Message, Step, active_parameters, distinct_share, token_bytes, work
from muster.lab.explain.workload import workload

inventory_of = cache(Inventory.of)
H200_PUBLISHED, PRO_6000 = 4.8e12, 1.792e12

# Weight bytes of a decode step at batch 1 in GB: attention with its projections and indexer, dense and shared layers,
# router and norms, routed experts, output head, all; active parameters in G; least ms at 4.8 and at 1.792 TB/s.
DECODE = {
    "qwen3.5-397b-a17b": (13.77, 1.51, 0.25, 15.10, 2.03, 32.66, 16.332, 6.805, 18.228),
    "qwen3.5-397b-a17b-fp8": (6.91, 0.76, 0.25, 7.55, 2.03, 17.50, 16.332, 3.647, 9.767),
    "qwen3.5-397b-a17b-nvfp4": (13.77, 1.51, 0.25, 4.25, 2.03, 21.81, 16.332, 4.544, 12.171),
    "qwen3.5-397b-a17b-nvfp4-v2": (6.91, 0.76, 0.25, 4.25, 2.03, 14.20, 16.332, 2.958, 7.923),
    "qwen3.5-122b-a10b": (8.26, 0.91, 0.08, 7.25, 1.53, 18.02, 9.008, 3.754, 10.054),
    "qwen3.5-122b-a10b-fp8": (4.15, 0.45, 0.08, 3.62, 1.53, 9.83, 9.008, 2.047, 5.483),
    "qwen3.5-122b-a10b-nvfp4": (8.26, 0.91, 0.08, 2.04, 1.53, 12.81, 9.008, 2.668, 7.147),
    "qwen3.5-35b-a3b": (2.57, 0.25, 0.04, 2.01, 1.02, 5.89, 2.946, 1.228, 3.288),
    "qwen3.5-35b-a3b-fp8": (1.29, 0.13, 0.04, 1.01, 1.02, 3.48, 2.946, 0.725, 1.943),
    "qwen3-next-80b-a3b": (3.08, 0.30, 0.10, 3.02, 0.62, 7.13, 3.564, 1.485, 3.977),
    "qwen3.6-35b-a3b-nvfp4": (1.29, 0.07, 0.04, 0.57, 0.29, 2.25, 2.946, 0.470, 1.258),
    "qwen3-235b-a22b": (13.40, 0.00, 0.10, 28.39, 1.24, 43.14, 21.568, 8.987, 24.072),
    "qwen3-30b-a3b": (1.81, 0.00, 0.03, 3.62, 0.62, 6.08, 3.042, 1.267, 3.395),
    "qwen3-235b-a22b-fp8": (6.70, 0.00, 0.10, 14.20, 1.24, 22.24, 21.568, 4.634, 12.413),
    "qwen3-30b-a3b-fp8": (0.91, 0.00, 0.03, 1.81, 0.62, 3.37, 3.042, 0.701, 1.878),
    "qwen3-235b-a22b-nvfp4": (3.77, 0.00, 0.10, 7.98, 1.24, 13.10, 21.568, 2.729, 7.310),
    "glm-5": (27.21, 7.02, 0.24, 45.30, 1.90, 81.66, 40.832, 17.013, 45.571),
    "glm-5-fp8": (13.61, 3.51, 0.24, 22.65, 1.90, 41.91, 40.832, 8.731, 23.388),
    "glm-5-nvfp4": (27.21, 1.97, 0.24, 12.74, 1.90, 44.06, 40.832, 9.179, 24.587),
    "glm-5.1-nvfp4": (27.21, 7.02, 0.24, 12.74, 1.90, 49.11, 40.832, 10.230, 27.403),
    "glm-5.2-nvfp4": (26.14, 7.02, 0.24, 12.74, 1.90, 48.04, 40.298, 10.008, 26.806),
    "deepseek-v3": (11.42, 3.74, 0.21, 20.44, 1.85, 37.67, 36.625, 7.847, 21.019),
    "deepseek-v3.1-nvfp4": (12.53, 2.11, 0.21, 11.49, 1.85, 28.20, 36.625, 5.874, 15.734),
    "deepseek-v3.2": (12.27, 3.74, 0.21, 20.44, 1.85, 38.52, 37.476, 8.025, 21.494),
    "deepseek-v3.2-nvfp4": (14.23, 2.11, 0.21, 11.49, 1.85, 29.90, 37.476, 6.229, 16.684),
    "kimi-k2": (6.17, 3.04, 0.33, 21.14, 2.35, 33.03, 31.686, 6.882, 18.434),
    "kimi-k2.5": (12.34, 6.08, 0.33, 11.89, 2.35, 32.98, 31.686, 6.872, 18.406),
    "kimi-k2.5-nvfp4": (12.34, 1.71, 0.33, 11.89, 2.35, 28.62, 31.686, 5.962, 15.969),
    "glm-4.7": (25.08, 5.33, 0.15, 33.60, 1.55, 65.71, 32.854, 13.689, 36.667),
    "glm-4.5-air": (10.03, 1.83, 0.05, 12.46, 1.24, 25.61, 12.802, 5.334, 14.288),
    "glm-4.5-fp8": (12.54, 2.67, 0.15, 16.80, 1.55, 33.71, 32.854, 7.023, 18.812),
    "glm-4.5-air-fp8": (5.02, 0.91, 0.05, 6.23, 1.24, 13.45, 12.802, 2.802, 7.505),
    "glm-4.7-nvfp4": (25.08, 1.50, 0.15, 9.45, 1.55, 37.73, 32.854, 7.860, 21.054),
    "gpt-oss-120b": (1.91, 0.00, 0.03, 1.91, 1.16, 5.00, 5.133, 1.042, 2.792),
    "gpt-oss-20b": (1.27, 0.00, 0.00, 1.27, 1.16, 3.71, 3.608, 0.772, 2.069),
    "mixtral-8x7b": (2.68, 0.00, 0.00, 22.55, 0.26, 25.50, 12.749, 5.312, 14.229),
    "olmoe-1b-7b": (0.54, 0.00, 0.00, 1.61, 0.21, 2.36, 1.179, 0.491, 1.316),
    "minimax-m2.5": (2.73, 0.00, 0.10, 7.02, 1.23, 11.08, 10.416, 2.309, 6.184),
    "minimax-m2.5-nvfp4": (5.46, 0.00, 0.10, 3.95, 1.23, 10.74, 10.416, 2.237, 5.992),
}
COLUMNS = (
    (Component.PROJECTIONS,),
    (Component.DENSE, Component.SHARED),
    (Component.ROUTER,),
    (Component.ROUTED,),
    (Component.HEAD,),
)


@pytest.mark.parametrize("name", DECODE)
def test_decode_at_batch_one_reads_the_published_bytes_in_the_published_time(name: str) -> None:
    inventory = inventory_of(name)
    *columns, total, active, at_h200, at_pro_6000 = DECODE[name]
    parts = {part.component: part.weight_bytes / 1e9 for part in work(inventory, Split(), Step())}
    for components, expected in zip(COLUMNS, columns, strict=True):
        found = sum(parts.get(component, 0.0) for component in components)
        assert found == pytest.approx(expected, rel=0.005, abs=0.0051), components  # two decimals were published
    assert sum(parts.values()) == pytest.approx(total, rel=0.005)
    assert active_parameters(inventory) / 1e9 == pytest.approx(active, rel=0.005)
    for bandwidth, expected in ((H200_PUBLISHED, at_h200), (PRO_6000, at_pro_6000)):
        machine = replace(gpu("h200"), bandwidth=bandwidth)
        weights = [replace(part, cache_bytes=0.0) for part in work(inventory, Split(), Step())]
        assert Limit.of(weights, machine).seconds * 1e3 == pytest.approx(expected, rel=0.005)


# GB of one draft's weights, and of the output head that it ends in.
DRAFTS = {
    "qwen3.5-397b-a17b": (0.558, 2.03),
    "qwen3.5-122b-a10b": (0.37, 1.53),
    "qwen3.5-35b-a3b": (0.13, 1.02),
    "glm-5": (1.16, 1.90),
    "deepseek-v3": (0.69, 1.85),
    "glm-4.7": (0.80, 1.55),
    "glm-4.5-air": (0.60, 1.24),
}


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_reads_the_published_bytes_and_the_models_own_head(name: str) -> None:
    weights, head = DRAFTS[name]
    parts = {part.component: part.weight_bytes / 1e9 for part in work(inventory_of(name), Split(), Step(draft=True))}
    assert parts.pop(Component.HEAD) == pytest.approx(head, abs=0.0051)
    # The published figure counts DeepSeek's join at one byte a weight; it is BF16 in the FP8 release.
    join = parts[Component.JOIN] / 2 if name == "deepseek-v3" else 0.0
    assert sum(parts.values()) - join == pytest.approx(weights, rel=0.02)


DISTINCT = {
    (512, 10): (10.0, 19.8, 29.4, 38.8, 57.1, 74.7, 138.6, 239.6, 367.1, 471.0),
    (256, 8): (8.0, 15.8, 23.3, 30.5, 44.4, 57.4, 102.0, 163.3, 222.4, 251.6),
    (384, 8): (8.0, 15.8, 23.5, 31.0, 45.6, 59.5, 109.8, 188.2, 284.2, 358.1),
    (128, 4): (4.0, 7.9, 11.6, 15.3, 22.2, 28.7, 51.0, 81.7, 111.2, 125.8),
    (8, 2): (2.0, 3.5, 4.6, 5.5, 6.6, 7.2, 7.9, 8.0, 8.0, 8.0),
}


@pytest.mark.parametrize("rule", DISTINCT)
def test_distinct_experts_are_those_of_independent_choices(rule: tuple[int, int]) -> None:
    experts, top_k = rule
    for tokens, expected in zip((1, 2, 3, 4, 6, 8, 16, 32, 64, 128), DISTINCT[rule], strict=True):
        assert experts * distinct_share(top_k / experts, tokens) == pytest.approx(expected, abs=0.051)


def test_most_of_what_a_token_reads_of_the_nvfp4_release_is_bf16() -> None:
    found = token_bytes(inventory_of("qwen3.5-397b-a17b-nvfp4"))
    assert found["bf16"] / sum(found.values()) == pytest.approx(0.80, abs=0.01)


def test_verification_reads_more_experts_and_everything_else_once() -> None:
    inventory = inventory_of("qwen3.5-397b-a17b-nvfp4")
    verify = work(inventory, Split(), Step(tokens=4, answers=4))
    routed = sum(part.weight_bytes for part in verify if part.component is Component.ROUTED)
    assert routed / 1e9 == pytest.approx(16.5, rel=0.01)
    assert sum(part.weight_bytes for part in verify) / 1e9 == pytest.approx(34, rel=0.01)


def test_states_are_read_and_written_by_every_sequence() -> None:
    inventory = inventory_of("qwen3.5-397b-a17b")
    part = next(p for p in work(inventory, Split(), Step(sequences=32)) if p.component is Component.STATES)
    assert part.cache_bytes / 32 == pytest.approx(2 * (188_743_680 + 2 * 1_658_880), rel=1e-9)


def test_glm_5_on_eight_cards_is_limited_by_what_every_rank_reads_whole() -> None:
    machine = machines("8xRTX-PRO-6000", tensor=None, expert=None)[0]
    roofline = Roofline(inventory_of("glm-5-nvfp4"), machine, workload(1, 0, "bf16", None, None))
    assert 1 / roofline.even == pytest.approx(325, rel=0.005)
    assert roofline.decode.local > 1.6 * roofline.even
    assert roofline.decode.largest.component is Component.PROJECTIONS


@pytest.mark.parametrize("name", ["qwen3.5-397b-a17b-nvfp4", "glm-5-nvfp4", "gpt-oss-120b", "glm-4.5-air"])
def test_changes_save_no_more_together_than_the_step_takes_and_no_less_than_the_best(name: str) -> None:
    found = changes(inventory_of(name), Split(), Step(past=4096), gpu("h200"))
    *single, together = found
    assert all(change.saved > 0 for change in found)
    assert together.saved >= single[0].saved == max(change.saved for change in single)
    assert together.saved < together.seconds + together.saved


def test_fp8_attention_saves_half_of_its_bytes() -> None:
    inventory, device = inventory_of("glm-5-nvfp4"), gpu("rtx pro 6000")
    change = next(c for c in changes(inventory, Split(), Step(), device) if c.name == "attention projections in FP8")
    assert change.saved * device.bandwidth / 1e9 == pytest.approx(27.21 / 2, rel=0.005)
    assert change.memory / 1e9 == pytest.approx(27.21 / 2, rel=0.005)


def test_drafting_breaks_even_exactly_at_its_break_even_acceptance() -> None:
    found = speculation(inventory_of("qwen3.5-397b-a17b-nvfp4"), Split(2), Step(past=1024), gpu("h200"), 3)
    assert found.break_even is not None
    assert found.speedup(found.break_even) == pytest.approx(1.0, abs=1e-4)
    assert found.speedup(1.0) == pytest.approx(4 * found.decode / (found.verify + 3 * found.draft))
    assert found.tokens(0.5) == 1 + 0.5 + 0.25 + 0.125


def test_drafting_that_cannot_pay_has_no_break_even() -> None:
    assert Speculation(1, decode=1.0, draft=0.5, verify=1.6).break_even is None


@given(
    operation=st.sampled_from(["all-reduce", "all-gather", "reduce-scatter"]),
    ranks=st.integers(2, 16),
    nbytes=st.integers(1, 1 << 30),
    which=st.integers(0, len(GPUS) - 1),
)
@settings(max_examples=200, deadline=None)
def test_a_collective_takes_at_least_its_start_a_step_and_its_bytes(operation, ranks, nbytes, which) -> None:
    link = GPUS[which].link
    seconds = message_time(Message(operation, ranks, nbytes, 1), link)
    least = link.start + link.step + nbytes * (ranks - 1) / ranks / link.bandwidth
    assert seconds >= least * (1 - 1e-9)
    assert message_time(Message(operation, ranks, nbytes, 3), link) == pytest.approx(3 * seconds)
    assert message_time(Message(operation, ranks, 2 * nbytes, 1), link) >= seconds


@pytest.mark.parametrize("name", ["qwen3.5-122b-a10b-nvfp4", "deepseek-v3.2", "gpt-oss-20b", "qwen3-next-80b-a3b"])
@given(batch=st.integers(1, 512), context=st.integers(0, 1 << 17))
@settings(max_examples=15, deadline=None)
def test_more_work_never_takes_less_time_and_never_less_per_step_than_its_bytes(name, batch, context) -> None:
    inventory, device = inventory_of(name), gpu("b200")
    found = limit(inventory, Split(), Step(sequences=batch, past=context), device)
    assert found.seconds >= found.bytes / device.bandwidth * (1 - 1e-9)
    assert limit(inventory, Split(), Step(sequences=batch + 1, past=context), device).seconds >= found.seconds
    assert limit(inventory, Split(), Step(sequences=batch, past=context + 64), device).seconds >= found.seconds
    assert math.isfinite(found.seconds)


def test_prefill_of_a_long_prompt_is_computing_and_decode_is_reading() -> None:
    inventory, device = inventory_of("qwen3-30b-a3b"), gpu("h200")
    prefill = limit(inventory, Split(), Step(tokens=32768), device)
    assert prefill.largest.bound is Bound.COMPUTE
    assert limit(inventory, Split(), Step(past=1024), device).largest.bound is Bound.MEMORY


def test_a_gpu_without_fp4_cores_computes_fp4_at_its_next_wider_rate() -> None:
    assert usable_rate("fp4", gpu("h200"))[0] == "fp8"
    assert usable_rate("fp4", gpu("a100"))[0] == "bf16"
    assert usable_rate("fp4", gpu("b200"))[0] == "fp4"


def test_a_count_before_a_gpu_is_its_tensor_parallel_degree() -> None:
    found = machines("h200, 8xRTX-PRO-6000", tensor=None, expert=None)
    assert [(str(machine), machine.split) for machine in found] == [
        ("H200", Split()),
        ("8x RTX PRO 6000", Split(8)),
    ]
    assert machines("8 x b200", tensor=1, expert=8)[0].split == Split(1, 8)
    with pytest.raises(UsageError, match="one number"):
        machines("8xb200", tensor=4, expert=None)


def test_measured_bandwidth_replaces_the_published_one_where_it_is_known() -> None:
    fast, slow = (machines("h200", tensor=None, expert=None, measured=m)[0].gpu.bandwidth for m in (False, True))
    assert (fast, slow) == (4.8e12, 4.54e12)


def muster(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "muster.cli", *arguments], capture_output=True, text=True, timeout=120)


def test_the_command_prints_one_document_whose_components_add_up() -> None:
    result = muster("roofline", "glm-5-nvfp4", "--gpu", "2xh200,8xb200", "--mtp", "2", "--acceptance", "0.8", "--json")
    assert result.returncode == 0, result.stderr
    first, second = json.loads(result.stdout)["machines"]
    for machine in (first, second):
        parts = machine["decode"]["components"]
        assert sum(part["seconds"] for part in parts) == pytest.approx(machine["decode"]["seconds"])
        assert [one["drafts"] for one in machine["speculation"]] == [1, 2]
        assert machine["speculation"][0]["tokens_per_step"] == pytest.approx(1.8)
        assert machine["assumptions"]
    assert (first["gpus"], second["gpus"]) == (2, 8)


def test_the_command_answers_first_and_states_its_assumptions() -> None:
    result = muster("roofline", "qwen3.5-397b-a17b-nvfp4", "--gpu", "2xh200")
    assert result.returncode == 0, result.stderr
    head = result.stdout.splitlines()[:4]
    assert "tok/s at most" in head[2]
    assert "attention projections" in head[3]
    assert "Assumptions\n" in result.stdout
    assert "4.8 TB/s, published" in result.stdout


def test_all_wrong_options_are_named_at_once() -> None:
    result = muster("roofline", "gpt-oss-20b", "--gpu", "h200", "--batch", "0", "--acceptance", "2", "--cache", "int3")
    assert result.returncode == 2
    assert all(option in result.stderr for option in ("--batch", "--acceptance", "--cache"))


def test_drafting_with_a_model_that_has_no_draft_layer_is_refused() -> None:
    result = muster("roofline", "gpt-oss-20b", "--gpu", "h200", "--mtp", "2")
    assert result.returncode == 2
    assert "stores no draft layer" in result.stderr
