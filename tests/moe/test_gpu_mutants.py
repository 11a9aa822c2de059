"""The program that puts bugs into the kernels in CUDA needs a GPU; that each bug still has its place does not."""

import pytest

pytest.importorskip("triton")

from .gpu_mutants import cuda, mutated


def test_every_bug_changes_one_place_of_its_source(tmp_path):
    bugs = [(source, change) for _, source, *_, mutants in cuda() for change in mutants.values()]
    for number, (source, change) in enumerate(bugs):
        assert mutated(source, *change, tmp_path, number).read_text() != source.read_text()
