"""Real checkpoints, only small: random Mixtral and Qwen3-MoE from transformers, with a byte-level tokenizer."""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

CONTEXT = 96
PAGE = 4
HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 16, 2
PAGE_BYTES = LAYERS * 2 * PAGE * KV_HEADS * HEAD_DIM * 4
EOS, EOS_OF_GENERATION = 257, 258
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ '<s>' + m['role'] + ':' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<s>assistant:' }}{% endif %}"
)

_SHAPE = {
    "vocab_size": 260,
    "hidden_size": 64,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "intermediate_size": 32,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.2,
    "tie_word_embeddings": False,
    "bos_token_id": 256,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


def mixtral():
    config = MixtralConfig(**_SHAPE, num_local_experts=8, num_experts_per_tok=2, sliding_window=None)
    return _seeded(MixtralForCausalLM, config)


def qwen3_moe():
    config = Qwen3MoeConfig(**_SHAPE, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=32)
    return _seeded(Qwen3MoeForCausalLM, config)


def _seeded(kind, config):
    torch.manual_seed(0)
    return kind(config).float().eval()


def save(model, directory, *, chat_template=CHAT_TEMPLATE, tokenizer=True):
    """Writes the checkpoint; its generation config names one more end of sequence."""
    model.generation_config.eos_token_id = [EOS, EOS_OF_GENERATION]
    model.save_pretrained(directory)
    if tokenizer:
        _tokenizer().save(str(directory / "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>", "chat_template": chat_template}
        (directory / "tokenizer_config.json").write_text(json.dumps(config))
    return directory


def _tokenizer():
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "<eos>", "<end>"])
    return tokenizer
