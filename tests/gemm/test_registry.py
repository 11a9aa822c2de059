import pytest
from torch import Tensor

from muster.errors import UsageError
from muster.formats.matrix import QuantMatrix
from muster.gemm.backend import LinearBackend, LinearFacts
from muster.gemm.backends.torch import TorchPrepared
from muster.gemm.problem import LinearProblem
from muster.gemm.registry import register_linear
from muster.workspace import Workspace

FACTS = LinearFacts(frozenset({"cpu"}), frozenset({"bf16"}), frozenset({"f32"}))


class Complete(LinearBackend[TorchPrepared]):
    facts = FACTS

    def prepare(self, problem: LinearProblem, matrix: QuantMatrix, bias_N: Tensor | None) -> TorchPrepared:
        return TorchPrepared(matrix, bias_N)

    def run(self, prepared: TorchPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
        out_TN.zero_()


def test_a_name_registered_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="second time"):
        register_linear("torch")(Complete)


def test_a_missing_method_and_missing_facts_are_refused_together() -> None:
    class Half(LinearBackend[TorchPrepared]):
        def run(self, prepared: TorchPrepared, x_TK: Tensor, out_TN: Tensor, workspace: Workspace) -> None:
            out_TN.zero_()

    with pytest.raises(UsageError) as caught:
        register_linear("half")(Half)
    assert "prepare" in str(caught.value)
    assert "facts" in str(caught.value)


def test_a_class_of_another_kind_is_refused() -> None:
    with pytest.raises(UsageError, match="LinearBackend"):
        register_linear("other")(type("Other", (), {"facts": FACTS}))
