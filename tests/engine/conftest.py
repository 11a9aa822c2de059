import pytest

from engine import tiny
from muster import LLM


@pytest.fixture(scope="session", params=["mixtral", "qwen3_moe"])
def pair(request, tmp_path_factory):
    """A model in transformers and the directory of its checkpoint."""
    model = getattr(tiny, request.param)()
    return model, tiny.save(model, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def directory(tmp_path_factory):
    """A Mixtral checkpoint."""
    return tiny.save(tiny.mixtral(), tmp_path_factory.mktemp("mixtral"))


@pytest.fixture
def llm(directory):
    """A fresh engine on it; when the test ends no page may be lost."""
    made = LLM(directory, page_size=tiny.PAGE, threads=1, unproven=True)
    yield made
    made.engine.check_integrity()
    assert made.engine.idle
