"""Scratch memory that backends share: named buffers that grow to the largest request and are then reused."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class Workspace:
    """Named scratch buffers that grow to the largest request and are then reused."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    _buffers: dict[tuple[str, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def buffers(self) -> tuple[Tensor, ...]:
        """Every buffer, for whoever weighs or poisons them."""
        return tuple(self._buffers.values())

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A contiguous tensor of that shape; its contents are whatever the last user left."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = torch.empty(size, dtype=dtype, device=self.device)
            self._buffers[name, dtype] = buffer
        return buffer[:size].view(shape)
