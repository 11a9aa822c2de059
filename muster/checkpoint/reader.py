"""Modules and tensors from an index, with whatever is wrong written into the books instead of raised."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from muster.checkpoint.accounting import Books
from muster.checkpoint.index import CheckpointIndex
from muster.checkpoint.quant import Stored, Survey
from muster.errors import CheckpointError, MusterError
from muster.formats import dialects
from muster.formats.matrix import QuantMatrix

_FLOATS = ("BF16", "F16", "F32")


def stand_in(shape: tuple[int, ...]) -> Tensor:
    """NaN in the place of a tensor that could not be read; it takes no memory."""
    return torch.full((), torch.nan, dtype=torch.bfloat16).expand(shape)


class Reader:
    """Reads; what is missing or misshapen is noted and stands as NaN until the books are closed."""

    def __init__(self, index: CheckpointIndex, survey: Survey, books: Books) -> None:
        self.index = index
        self.survey = survey
        self.books = books

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """An unquantised tensor in its stored dtype, mapped from the file."""
        entry = self.index.tensors.get(name)
        if entry is None:
            self.books.absent(name, f"shape {list(shape)}")
            return stand_in(shape)
        self.books.consume([name])
        if entry.shape != shape:
            self.books.note(CheckpointError(name, found=f"shape {list(entry.shape)}", expected=f"shape {list(shape)}"))
            return stand_in(shape)
        if entry.dtype not in _FLOATS:
            self.books.note(CheckpointError(name, found=f"dtype {entry.dtype}", expected=" or ".join(_FLOATS)))
            return stand_in(shape)
        return self.index.read(name)

    def matrix(self, module: str, shape: tuple[int, ...]) -> QuantMatrix:
        """The weight `[..., N, K]` of one module in its stored format, mapped from the file."""
        stored = self.alike([module], f"shape {list(shape)}")
        if stored is None:
            return QuantMatrix.plain(stand_in(shape))
        parts = {part: self.index.read(name) for part, name in stored[0].parts.items()}
        return self.decide(stored[0], parts, shape, module)

    def decide(self, stored: Stored, parts: Mapping[str, Tensor], shape: tuple[int, ...], name: str) -> QuantMatrix:
        """The matrix of these parts, its shape and scales checked."""
        try:
            return dialects.read(stored.dialect, parts, shape, name)
        except MusterError as error:
            self.books.note(error)
            return QuantMatrix.plain(stand_in(shape))

    def alike(self, modules: Sequence[str], expected: str) -> list[Stored] | None:
        """How these modules are stored; None, after noting why, unless all are there and in one dialect."""
        found = [self.survey.modules.get(module) for module in modules]
        kinds = Counter(stored.dialect for stored in found if stored is not None)
        if not kinds:
            for module in modules:
                self.books.absent(f"{module}.weight", expected)
            return None
        dialect = kinds.most_common(1)[0][0]
        for module, stored in zip(modules, found, strict=True):
            if stored is not None:
                self.books.consume(stored.parts.values())
            if stored is None or stored.dialect is not dialect:
                self._note_unlike(module, stored, dialect, expected)
        alike = [stored for stored in found if stored is not None and stored.dialect is dialect]
        return alike if len(alike) == len(modules) else None

    def _note_unlike(self, module: str, stored: Stored | None, dialect: dialects.Dialect, expected: str) -> None:
        names = [dialect.tensor_name(module, part.name) for part in dialect.parts if part.required]
        lacking = [name for name in names if name not in self.index.tensors]
        self.books.consume(name for name in names if name in self.index.tensors)
        for name in lacking:
            self.books.absent(name, f"{expected} in {dialect.value}, as its siblings have it")
        if not lacking:
            found = f"stored as {stored.dialect.value}" if stored is not None else "tensors of no known dialect"
            self.books.note(CheckpointError(module, found=found, expected=f"{dialect.value}, as its siblings are"))
