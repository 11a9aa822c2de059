"""The formats that `muster quantize` writes: codec, dialect on disk, and what config.json says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import Tensor

from muster.formats import dialects
from muster.formats.codec import encode
from muster.formats.dialects import Dialect, Part
from muster.formats.matrix import Meaning
from muster.formats.spec import FP8_BLOCK, MXFP4, NVFP4, Format


@dataclass(frozen=True)
class Recipe:
    """One choice of `--format`.

    Attributes:
        format: what weights become.
        dialect: how they are spelled on disk.
        config: `quantization_config`, given the modules left alone.
    """

    format: Format
    dialect: Dialect
    config: Callable[[Sequence[str]], dict[str, Any]]

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts that are written: activation scales need calibration data and are left out."""
        return tuple(part for part in self.dialect.parts if part.required)

    def quantise(self, weight: Tensor) -> dict[str, Tensor]:
        """The parts of a matrix `[N, K]`, by name."""
        divides = any(part.divides for part in self.parts)
        matrix = encode(weight, self.format, tensor_scale=Meaning.DIVIDES if divides else Meaning.MULTIPLIES)
        return dialects.write(matrix, self.dialect)


def _modelopt_nvfp4(ignore: Sequence[str]) -> dict[str, Any]:
    weights = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "config_groups": {"group_0": {"weights": weights, "targets": ["Linear"]}},
        "ignore": list(ignore),
    }


def _compressed_tensors(
    packing: str, strategy: str, group: int, scale: str
) -> Callable[[Sequence[str]], dict[str, Any]]:
    def config(ignore: Sequence[str]) -> dict[str, Any]:
        weights = {
            "num_bits": 4,
            "type": "float",
            "strategy": strategy,
            "group_size": group,
            "symmetric": True,
            "dynamic": False,
            "scale_dtype": scale,
        }
        scheme = {"format": packing, "targets": ["Linear"], "weights": weights, "input_activations": None}
        return {
            "quant_method": "compressed-tensors",
            "format": packing,
            "quantization_status": "compressed",
            "config_groups": {"group_0": scheme},
            "ignore": list(ignore),
        }

    return config


def _fp8_block(ignore: Sequence[str]) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": list(ignore),
    }


RECIPES: Mapping[str, Recipe] = MappingProxyType(
    {
        "nvfp4": Recipe(NVFP4, Dialect.MODELOPT_NVFP4, _modelopt_nvfp4),
        "nvfp4-ct": Recipe(
            NVFP4,
            Dialect.CT_NVFP4,
            _compressed_tensors("nvfp4-pack-quantized", "tensor_group", 16, "torch.float8_e4m3fn"),
        ),
        "mxfp4": Recipe(
            MXFP4, Dialect.CT_MXFP4, _compressed_tensors("mxfp4-pack-quantized", "group", 32, "torch.uint8")
        ),
        "fp8-block": Recipe(FP8_BLOCK, Dialect.FP8_BLOCK, _fp8_block),
    }
)
"""The recipes by the name that users type."""
