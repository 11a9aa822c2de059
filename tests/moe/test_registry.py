"""Registration refuses what could only fail later."""

from dataclasses import replace

import pytest

from muster.contract import Registry
from muster.errors import UsageError
from muster.moe.backend import Facts, FusedFunc, RowLayout, RunnerCore
from muster.moe.registry import backends, register_fused_func, register_runner_core

FACTS = Facts(frozenset({"cpu"}), frozenset({"bf16"}), frozenset({"f32"}), frozenset({"silu"}))


class GoodCore(RunnerCore):
    facts = FACTS
    layouts = frozenset({RowLayout.SORTED})

    def prepare(self, problem, weights): ...

    def run(self, prepared, rows, out_RD, workspace): ...


class GoodFunc(FusedFunc):
    facts = FACTS

    def prepare(self, problem, weights): ...

    def run(self, prepared, x_TD, routed, out_TD, workspace): ...


class NoRun(RunnerCore):
    facts = FACTS
    layouts = frozenset({RowLayout.SORTED})

    def prepare(self, problem, weights): ...


class NothingAtAll(FusedFunc):
    pass


class NoLayouts(GoodCore):
    layouts = (RowLayout.SORTED,)
    row_block = 0


def refusal(decorator, backend) -> str:
    with pytest.raises(UsageError) as caught:
        decorator(backend)
    return str(caught.value)


def test_name_taken_twice_is_refused_and_the_first_keeps_it():
    first = backends().get("torch")
    text = refusal(register_runner_core("torch"), GoodCore)
    assert "'torch'" in text
    assert "GoodCore" in text
    assert "muster.moe.backends.torch" in text
    assert backends().get("torch") is first


def test_unknown_dispatcher_is_refused():
    text = refusal(register_fused_func("good", dispatcher="teleport"), GoodFunc)
    assert "'teleport'" in text
    assert "standard" in text
    assert "good" not in backends().names()


def test_missing_methods_and_facts_are_refused_together():
    assert "NoRun.run" in refusal(register_runner_core("half"), NoRun)
    text = refusal(register_fused_func("empty", dispatcher="teleport"), NothingAtAll)
    assert all(word in text for word in ("NothingAtAll.prepare", "NothingAtAll.run", ".facts", "'teleport'"))


def test_layouts_of_the_wrong_kind_are_refused():
    text = refusal(register_runner_core("flat"), NoLayouts)
    assert "NoLayouts.layouts" in text
    assert "NoLayouts.row_block" in text


def test_wrong_base_class_is_refused():
    assert "a FusedFunc" in refusal(register_fused_func("core"), GoodCore)
    assert "a RunnerCore" in refusal(register_runner_core("func"), GoodFunc)


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("devices", "cpu"),
        ("weights", {"bf16"}),
        ("activations", ["silu"]),
        ("bias", 1),
        ("hidden_multiple", 16.0),
        ("hidden_multiple", True),
        ("max_tokens", "8"),
        ("kernels", "moe"),
    ],
)
def test_fact_of_the_wrong_kind_is_refused(fact, value):
    backend = type("Odd", (GoodCore,), {"facts": replace(FACTS, **{fact: value})})
    assert f".facts.{fact}" in refusal(register_runner_core("odd"), backend)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(UsageError, match=r"'tritno'.*torch"):
        backends().get("tritno")


def test_own_module_that_does_not_register_its_name_is_refused():
    registry = Registry("expert-layer", {"ghost": "muster.moe.problem"})
    with pytest.raises(UsageError, match="ghost"):
        registry.get("ghost")
