"""The model families that run, and `load`. A family is one file, which says how its attention is made, and one row."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from muster.checkpoint.config import read_spec
from muster.checkpoint.loader import Loader
from muster.checkpoint.spec import AttentionSpec, ModelSpec
from muster.device import Device, cpu
from muster.errors import ConfigError
from muster.model.choosing import unproven
from muster.model.decoder import Attention, Decoder, DecoderLayer
from muster.model.parameters import Parameters
from muster.plan import Choose

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        "mixtral": "muster.model.mixtral",
        "olmoe": "muster.model.olmoe",
        "qwen3_moe": "muster.model.qwen3_moe",
    }
)
"""`ModelSpec.family` to the module whose `attention` makes the attention block of one layer."""

MakeAttention = Callable[[Parameters, str, AttentionSpec], Attention]
"""Makes an attention block from the parameters, the layer's module path and what the config says of it."""


def load(
    directory: Path,
    *,
    choose: Choose | None = None,
    device: Device | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Decoder:
    """The model of a checkpoint directory, ready to run.

    Args:
        directory: the checkpoint.
        choose: answers which backends run each part, `Plan.choice` for one; None chooses by declared facts alone.
        device: where to run; None: this machine's processor.
        progress: called with the bytes read so far and the bytes of all tensors.

    Raises:
        ConfigError: a config that cannot be read, or an architecture that does not run yet.
        CheckpointError: files, names or shapes that are wrong; every one of them.
        UsageError: no backend can run a part.
        UnprovenError: the plan does not cover a part.
    """
    device = device or cpu()
    make_attention = _attention_of(read_spec(directory))
    loader = Loader.open(directory, progress=progress)
    p = Parameters(loader, device, choose or unproven(device))
    embed = p.embedding()
    layers = [_layer(p, index, make_attention) for index in range(len(p.spec.layers))]
    norm, head = p.norm(p.names.norm), p.head()
    loader.finish()
    return Decoder(p.spec, device, embed, p.ropes, layers, norm, head, p.plan, p.nbytes, p.nbytes - p.idle_bytes)


def _layer(p: Parameters, index: int, make_attention: MakeAttention) -> DecoderLayer:
    module = p.names.layer(index)
    return DecoderLayer(
        attention_norm=p.norm(f"{module}.input_layernorm"),
        attention=make_attention(p, module, p.spec.layers[index].attention),
        feed_forward_norm=p.norm(f"{module}.post_attention_layernorm"),
        feed_forward=p.feed_forward(index),
    )


def _attention_of(spec: ModelSpec) -> MakeAttention:
    if spec.family not in FAMILIES:
        raise ConfigError(
            f"architecture {spec.architecture}",
            found=f"model type {spec.family}, which can be inspected but not run yet",
            expected=f"one of {', '.join(FAMILIES)}",
        )
    make_attention: MakeAttention = importlib.import_module(FAMILIES[spec.family]).attention
    return make_attention
