import openai
import pytest
from engine import tiny
from transformers import MixtralConfig, MixtralForCausalLM

from server.process import Server

CONTEXT = 1024
TEMPLATE = (
    "{% if tools %}{{ '<s>tools:' + tools | tojson + ' <tool_call>{}</tool_call>' }}{% endif %}"
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}"
    "{% if enable_thinking %}{{ '<think>' }}{% else %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A Mixtral of random weights whose chat template knows tools and reasoning in Qwen3's style."""
    shape = {**tiny._SHAPE, "max_position_embeddings": CONTEXT}
    config = MixtralConfig(**shape, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    model = tiny._seeded(MixtralForCausalLM, config)
    return tiny.save(model, tmp_path_factory.mktemp("server") / "tiny", chat_template=TEMPLATE)


@pytest.fixture(scope="session")
def server(checkpoint):
    with Server(checkpoint) as running:
        yield running


@pytest.fixture(scope="session")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60)
