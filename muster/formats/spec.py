"""What the bits of a stored weight matrix mean: element type, the block that shares a scale, bytes per weight.

A matrix is `[N, K]` (output rows, input columns), optionally stacked in front (`[E, N, K]` for experts).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType


class Element(Enum):
    """An element type, by its field name in the specifications.

    Sources: OCP Microscaling Formats v1.0 (e2m1, e8m0), OCP 8-bit Floating Point v1.0 (e4m3), IEEE 754.
    """

    E2M1 = "e2m1"
    E4M3 = "e4m3"
    E8M0 = "e8m0"
    UINT4 = "uint4"
    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def bits(self) -> int:
        """Bits per element as stored."""
        return {"e2m1": 4, "uint4": 4, "e4m3": 8, "e8m0": 8, "bf16": 16, "f16": 16, "f32": 32}[self.value]


WHOLE = 0
"""A block extent that covers the whole axis."""


@dataclass(frozen=True)
class Format:
    """How a weight matrix `[N, K]` is stored.

    Attributes:
        name: the name users see and type (`nvfp4`, `fp8-block`, ...).
        element: type of one code.
        block: rows and columns that share one scale; `WHOLE` means the full axis. None: no scales (bf16, f16, f32).
        scale: element type of that scale.
        global_scale: a float32 scale per tensor (per row piece of a fused tensor) multiplies the block scales (NVFP4).
        zero_point: codes are unsigned and a zero point per block is subtracted before scaling.
    """

    name: str
    element: Element
    block: tuple[int, int] | None = None
    scale: Element | None = None
    global_scale: bool = False
    zero_point: bool = False

    @property
    def family(self) -> str:
        """The name without its group size: what a backend declares (`int4` for `int4-g32`)."""
        return "int4" if self.element is Element.UINT4 else self.name

    @property
    def quantised(self) -> bool:
        """Whether codes need scales."""
        return self.block is not None

    @property
    def codes_per_byte(self) -> int:
        """Codes packed in one byte along K (2 for 4-bit elements, else 1)."""
        return 2 if self.element.bits == 4 else 1

    def scale_shape(self, rows: int, columns: int) -> tuple[int, int]:
        """Shape of the block scales of an `[rows, columns]` matrix; edge blocks may be partial.

        Raises:
            ValueError: the format has no scales.
        """
        if self.block is None:
            raise ValueError(f"{self.name} has no scales")
        block_rows = self.block[0] or rows
        block_columns = self.block[1] or columns
        return -(-rows // block_rows), -(-columns // block_columns)

    def bytes(self, rows: int, columns: int, pieces: int = 1) -> int:
        """Bytes of an `[rows, columns]` matrix as stored, scales included; `pieces` global scales."""
        total = rows * columns * self.element.bits // 8
        if self.block is not None and self.scale is not None:
            scale_rows, scale_columns = self.scale_shape(rows, columns)
            total += scale_rows * scale_columns * (self.scale.bits + (8 if self.zero_point else 0)) // 8
        return total + (4 * pieces if self.global_scale else 0)


BF16 = Format("bf16", Element.BF16)
F16 = Format("f16", Element.F16)
F32 = Format("f32", Element.F32)
NVFP4 = Format("nvfp4", Element.E2M1, block=(1, 16), scale=Element.E4M3, global_scale=True)
MXFP4 = Format("mxfp4", Element.E2M1, block=(1, 32), scale=Element.E8M0)
FP8_TENSOR = Format("fp8-tensor", Element.E4M3, block=(WHOLE, WHOLE), scale=Element.F32)
FP8_CHANNEL = Format("fp8-channel", Element.E4M3, block=(1, WHOLE), scale=Element.F32)
FP8_BLOCK = Format("fp8-block", Element.E4M3, block=(128, 128), scale=Element.F32)


def int4(group: int) -> Format:
    """4-bit integers with one scale and one zero point per `group` columns (compressed-tensors, GPTQ, AWQ)."""
    return Format(f"int4-g{group}", Element.UINT4, block=(1, group), scale=Element.F32, zero_point=True)


FORMATS: Mapping[str, Format] = MappingProxyType(
    {f.name: f for f in (BF16, F16, F32, NVFP4, MXFP4, FP8_TENSOR, FP8_CHANNEL, FP8_BLOCK, int4(32), int4(128))}
)
"""The formats by name; other int4 group sizes come from `int4(group)`."""
