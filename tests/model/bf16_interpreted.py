"""A program: a model as a GPU would run it, in bf16 on Triton's kernels, but on the interpreter."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from muster.device import Device
from muster.engine import canary
from muster.lab.build.quantize import quantize
from muster.model.choosing import unproven
from muster.model.families import load

from . import oracle

SIZES = {
    "qwen3_moe": {"hidden_size": 128, "moe_intermediate_size": 128},
    "mixtral": {"hidden_size": 128, "intermediate_size": 128},
}


class Interpreted(Device):
    """A GPU whose memory is the processor's."""

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")


def main() -> None:
    """Prints how far the logits of a prompt are from the truth, read at once and in pieces.

    That is transformers, or where it was quantised the same checkpoint as a processor runs it.
    """
    family, format, backend, folder = sys.argv[1:]
    model = oracle.make(family, stored=torch.bfloat16, **SIZES[family])
    directory = oracle.save(model, Path(folder) / "bf16", torch.bfloat16)
    if format != "bf16":
        quantize(directory, format, Path(folder) / format)
        directory = Path(folder) / format
    here = Interpreted("9.0", "a GPU that is not here", 1 << 34, 1, present=False)
    decoder = load(directory, choose=unproven(here, backend), device=here)
    canary.sing(decoder)
    ids = oracle.tokens(14)
    truth = oracle.truth(model, ids) if format == "bf16" else oracle.chunked(load(directory), ids, [14])
    pieces = [oracle.chunked(decoder, ids, chunks) for chunks in ([14], [9, 1, 4])]
    dtypes = {str(layer.key_PSMH.dtype) for layer in decoder.new_cache(1, 4)}
    sys.stdout.write(json.dumps({"errors": [oracle.error(each, truth) for each in pieces], "cache": sorted(dtypes)}))


if __name__ == "__main__":
    main()
