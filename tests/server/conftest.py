import openai
import pytest

from server import small
from server.process import Server


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return small.save(tmp_path_factory.mktemp("server") / "tiny")


@pytest.fixture(scope="session")
def server(checkpoint):
    with Server(checkpoint) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
