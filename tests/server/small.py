"""The checkpoint that servers in tests serve."""

from engine import tiny
from transformers import MixtralConfig, MixtralForCausalLM

CONTEXT = 1024
TEMPLATE = (
    "{% if tools %}{{ '<s>tools:' + tools | tojson + ' <tool_call>{}</tool_call>' }}{% endif %}"
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}"
    "{% if enable_thinking %}{{ '<think>' }}{% else %}{{ '<think></think>' }}{% endif %}{% endif %}"
)


def save(directory):
    """A Mixtral of random weights whose chat template knows tools and reasoning in Qwen3's style."""
    shape = {**tiny._SHAPE, "max_position_embeddings": CONTEXT}
    config = MixtralConfig(**shape, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    return tiny.save(tiny._seeded(MixtralForCausalLM, config), directory, chat_template=TEMPLATE)
