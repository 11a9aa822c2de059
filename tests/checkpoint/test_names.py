"""Names in messages."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from muster.checkpoint.names import grouped, shown


def test_numbers_that_vary_together_become_ranges() -> None:
    names = [f"model.layers.{layer}.experts.{expert}.w" for layer in (0, 1, 2, 7) for expert in range(4)]
    assert grouped([*names, "model.norm"]) == ["model.layers.{0-2,7}.experts.{0-3}.w (16 tensors)", "model.norm"]


def test_numbers_that_do_not_vary_together_stay_apart() -> None:
    assert grouped(["l.0.e.0", "l.0.e.1", "l.1.e.1"]) == ["l.0.e.{0-1} (2 tensors)", "l.1.e.1"]


def expand(text: str) -> set[str]:
    """The names that one line of `grouped` stands for."""
    name = text.split(" (")[0]
    if "{" not in name:
        return {name}
    before, _, rest = name.partition("{")
    inside, _, after = rest.partition("}")
    runs = [run.split("-") for run in inside.split(",")]
    numbers = [n for run in runs for n in range(int(run[0]), int(run[-1]) + 1)]
    return {full for n in numbers for full in expand(f"{before}{n}{after}")}


@given(st.sets(st.tuples(st.integers(0, 5), st.integers(0, 5), st.sampled_from("xy"))))
def test_grouping_leaves_nothing_out_and_adds_nothing(triples: set[tuple[int, int, str]]) -> None:
    names = {f"layers.{a}.experts.{b}.{c}" for a, b, c in triples}
    lines = [expand(line) for line in grouped(names)]
    assert set().union(*lines) == names
    assert sum(map(len, lines)) == len(names)


def test_a_name_of_numbers_alone_is_no_trouble() -> None:
    name = "a" + ".1" * 5000
    assert grouped([name]) == [shown(name)]
    assert len(shown(name)) < 300
