"""Choices by declared facts: who runs for how many tokens, why, and why not."""

from dataclasses import replace

import pytest
from moe.cases import problem

from muster import device
from muster.contract import Registry
from muster.errors import UsageError
from muster.formats.spec import NVFP4
from muster.moe.backend import Facts, FusedFunc, RowLayout, RunnerCore
from muster.moe.problem import Activation
from muster.moe.registry import backends
from muster.plan import Choice, Loser, Plan, PlanEntry, Role, by_facts

FACTS = Facts(frozenset({"cpu"}), frozenset({"bf16"}), frozenset({"f32"}), frozenset({"silu"}))


class Core(RunnerCore):
    facts = FACTS
    layouts = frozenset({RowLayout.SORTED})

    def prepare(self, problem, weights): ...

    def run(self, prepared, rows, out_RD, workspace): ...


class Func(FusedFunc):
    facts = FACTS

    def prepare(self, problem, weights): ...

    def run(self, prepared, x_TD, routed, out_TD, workspace): ...


@pytest.fixture
def registry():
    return Registry("expert-layer", {})


@pytest.fixture
def register(registry):
    """Puts a backend of those facts into the registry."""

    def add(name, base, **facts):
        registry.register(name, lambda _: None)(type(name, (base,), {"facts": replace(FACTS, **facts)}))

    return add


@pytest.fixture
def resolve(registry):
    """The choice among the registered for a problem on this processor."""

    def choose(problem, requested=None) -> Choice:
        return by_facts(registry, problem, device.cpu(), requested, kind="expert-layer")

    return choose


def choices(plan):
    return [(entry.max_tokens, entry.backend) for entry in plan.entries]


def test_few_token_functions_come_first_and_a_core_takes_the_rest(register, resolve):
    register("any", Core)
    register("sixteen", Func, max_tokens=16)
    register("four", Func, max_tokens=4)
    register("also four", Func, max_tokens=4)
    register("other", Core)
    register("fused", Func)
    plan = resolve(problem())
    assert choices(plan) == [(4, "four"), (16, "sixteen"), (None, "any")]
    assert [plan.backend_for(tokens) for tokens in (0, 1, 4, 5, 16, 17, 9999)] == [
        *["four"] * 3,
        *["sixteen"] * 2,
        *["any"] * 2,
    ]
    assert {loser.backend for loser in plan.losers} == {"also four", "other", "fused"}


def test_description_is_one_line_with_winners_losers_and_reasons(register, resolve):
    register("core", Core)
    register("few", Func, max_tokens=8)
    register("gpu", Core, devices=frozenset({"9.0"}), weights=frozenset({"nvfp4"}))
    line = resolve(problem()).describe()
    assert "\n" not in line
    assert line.startswith("few for up to 8 tokens (meant for few tokens), core above (")
    assert "gpu (runs on 9.0, this is cpu; reads nvfp4 weights, these are bf16)" in line


def test_requested_few_token_function_is_completed_by_a_core_and_says_so(register, resolve):
    register("core", Core)
    register("fused", Func)
    register("few", Func, max_tokens=8)
    register("fewer", Func, max_tokens=2)
    plan = resolve(problem(), "few")
    assert choices(plan) == [(8, "few"), (None, "core")]
    assert "few for up to 8 tokens (asked for), core above (completes few" in plan.describe()


@pytest.mark.parametrize("name", ["core", "fused"])
def test_requested_backend_of_any_reach_runs_alone(register, resolve, name):
    register("other", Core)
    register("core", Core)
    register("fused", Func)
    register("few", Func, max_tokens=8)
    plan = resolve(problem(), name)
    assert choices(plan) == [(None, name)]
    assert all(f"{name} was asked for" in loser.reasons for loser in plan.losers)


def test_requested_backend_that_cannot_run_is_an_error_with_all_reasons(register, resolve):
    register("core", Core)
    register("gpu", Core, devices=frozenset({"9.0"}), activations=frozenset({"gelu"}), hidden_multiple=7)
    with pytest.raises(UsageError) as caught:
        resolve(problem(weights=NVFP4, activation=Activation("relu2"), bias=True), "gpu")
    for words in ("'gpu' cannot run", "runs on 9.0", "nvfp4", "relu2", "biases", "hidden % 7"):
        assert words in str(caught.value)


def test_nothing_for_large_counts_is_an_error(register, resolve):
    register("few", Func, max_tokens=8)
    register("gpu", Core, devices=frozenset({"9.0"}))
    for requested in (None, "few"):
        with pytest.raises(UsageError, match=r"runs on 9\.0"):
            resolve(problem(), requested)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"'tritno'.*torch"):
        by_facts(backends(), problem(), device.cpu(), "tritno", kind="expert-layer")


def test_broken_package_of_someone_else_loses_and_stops_nothing():
    class Broken(Registry):
        def get(self, name):
            raise UsageError(f"expert-layer backend {name!r}", found="ImportError:\nno such library")

    with pytest.raises(UsageError, match="ImportError: no such library"):
        by_facts(Broken("expert-layer", {"bad": "nowhere"}), problem(), device.cpu(), kind="expert-layer")


def test_a_plan_is_told_in_one_line_in_which_parts_with_the_same_winners_share_their_words():
    """Figures span the parts; backends that lost for the same reason are named together, refusals counted."""

    def choice(ahead, *losers):
        return Choice((PlanEntry(8, "cpu", "fastest", ("a",), ahead), PlanEntry(None, "torch", "the rest")), losers)

    gpu = Loser("gpu", ("runs on 9.0", "reads nvfp4"), refuses=True)
    slow = (Loser("slow", ("takes 2.0x the time", "wrong at 8 tokens")), Loser("slower", ("takes 2.0x the time",)))
    other = Choice((PlanEntry(None, "slow", "fastest"),), ())
    parts = {
        (Role.EXPERTS, 1): choice((2.0, 30.0), *slow, gpu),
        (Role.LINEARS, 1): choice((1.5, 2.0), slow[0], gpu),
        (Role.LINEARS, 2): choice((1.0, 1.7), gpu),
        (Role.LINEARS, 3): other,
    }
    assert Plan(parts).describe() == (
        "experts: cpu for up to 8 tokens (fastest, 2.0-30x as fast as the next), torch above (the rest), "
        "lost: slow and slower (takes 2.0x the time), 1 cannot run here; "
        "linears: cpu for up to 8 tokens (fastest, 1.0-2.0x as fast as the next), torch above (the rest), "
        "elsewhere slow for any token count (fastest), 1 cannot run here"
    )
    assert not Plan(parts).proven
