"""Memory that shows who wrote where: NaNs that no computation returns, in an output and on both sides of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

_INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
_NANS = {torch.float32: 0x7FC0DEAD, torch.bfloat16: 0x7FDE, torch.float16: 0x7FDE}
_PIECE = 1 << 24
GUARD_ROWS = 128
"""Rows before and after the output: what a tile of rows that forgets its mask writes too much."""


@dataclass(frozen=True, eq=False)
class PoisonedOutput:
    """An output of T rows between two guard bands, in one piece of memory.

    Attributes:
        out: `[T, N]`, what a backend gets.
        whole: integers `[GUARD_ROWS + T + GUARD_ROWS, N]`, bit for bit the memory it lies in.
    """

    out: Tensor
    whole: Tensor

    @classmethod
    def allocate(cls, tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> PoisonedOutput:
        """Fresh memory, every element of it poisoned."""
        shape = (tokens + 2 * GUARD_ROWS, width)
        return cls.over(torch.full(shape, _NANS[dtype], dtype=_INTEGERS[dtype], device=device), dtype)

    @classmethod
    def from_bytes(cls, data: bytes, width: int, dtype: torch.dtype) -> PoisonedOutput:
        """What `to_bytes` gave, on the CPU."""
        return cls.over(torch.frombuffer(bytearray(data), dtype=_INTEGERS[dtype]).view(-1, width), dtype)

    @classmethod
    def over(cls, whole: Tensor, dtype: torch.dtype) -> PoisonedOutput:
        """The output that lies in `whole`."""
        return cls(whole[GUARD_ROWS : len(whole) - GUARD_ROWS].view(dtype), whole)

    def to_bytes(self) -> bytes:
        """All of it, guard bands included."""
        return self.whole.cpu().numpy().tobytes()

    @property
    def unwritten(self) -> int:
        """Elements of the output that are still poisoned."""
        return int((self._rows == self._poison).sum())

    @property
    def outside(self) -> int:
        """Elements before and after the output that are poisoned no longer."""
        bands = self.whole[:GUARD_ROWS], self.whole[len(self.whole) - GUARD_ROWS :]
        return sum(int((band != self._poison).sum()) for band in bands)

    @property
    def _rows(self) -> Tensor:
        return self.whole[GUARD_ROWS : len(self.whole) - GUARD_ROWS]

    @property
    def _poison(self) -> int:
        return _NANS[self.out.dtype]


def poison(buffers: Iterable[Tensor]) -> None:
    """Fills scratch memory with what shows if it is read before it is written."""
    for buffer in buffers:
        buffer.fill_(float("nan") if buffer.is_floating_point() else torch.iinfo(buffer.dtype).max)


def checksum(tensor: Tensor) -> int:
    """Of the bits: another one for any change that is no deliberate forgery."""
    data = tensor.contiguous().view(-1).view(torch.uint8)
    total = 0
    for start in range(0, len(data), _PIECE):
        piece = data[start : start + _PIECE]
        padded = functional.pad(piece, (0, -len(piece) % 8)).view(torch.int64)
        weights = torch.arange(1, 2 * len(padded) + 1, 2, device=tensor.device)
        total = 31 * total + int((padded * weights).sum())
    return total
