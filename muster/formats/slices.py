"""A rank's share of a stored matrix: rows or columns cut out on the edges of its blocks, the payload untouched."""

from __future__ import annotations

import torch

from muster.errors import FormatError
from muster.formats.matrix import QuantMatrix
from muster.formats.spec import WHOLE


def take_rows(matrix: QuantMatrix, start: int, stop: int, pieces: int = 1) -> QuantMatrix:
    """Rows `[start, stop)` of each of `pieces` equal row pieces (2: a fused gate and up keep their halves).

    Raises:
        FormatError: a cut inside a block of rows that share a scale.
    """
    rows = matrix.shape[-2] // pieces
    block = matrix.format.block[0] if matrix.format.block else 1
    if (start, stop) == (0, rows):
        return matrix
    if block and (start % block or (stop % block and stop != rows) or (pieces > 1 and rows % block)):
        raise FormatError(
            f"{matrix.format.name} matrix of {pieces} x {rows} rows",
            found=f"a cut at rows {start} and {stop}",
            expected=f"cuts on {block}-row blocks",
        )
    tensors = {}
    for name, tensor in matrix.tensors.items():
        if name == "codes" or (name in ("scale", "zero") and block != WHOLE):
            each = torch.unflatten(tensor, -2, (pieces, -1))
            step = block if name != "codes" else 1
            tensors[name] = each[..., start // step : -(-stop // step), :].flatten(-3, -2).contiguous()
    return matrix.with_tensors(tensors, (*matrix.shape[:-2], pieces * (stop - start), matrix.shape[-1]))


def take_columns(matrix: QuantMatrix, start: int, stop: int) -> QuantMatrix:
    """Columns `[start, stop)`.

    Raises:
        FormatError: a cut inside a block of columns that share a scale, or columns whose scale groups are in any order.
    """
    columns = matrix.shape[-1]
    block = matrix.format.block[1] if matrix.format.block else 1
    if (start, stop) == (0, columns):
        return matrix
    if matrix.order is not None:
        raise FormatError("act-order columns", found=f"a cut at {start} and {stop}", expected="all columns together")
    unit = max(block, matrix.format.codes_per_byte)
    if start % unit or (stop % unit and stop != columns):
        raise FormatError(
            f"{matrix.format.name} matrix of {columns} columns",
            found=f"a cut at columns {start} and {stop}",
            expected=f"cuts on {unit}-column blocks",
        )
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in matrix.tensors.items():
        if name == "codes" or (name in ("scale", "zero") and block != WHOLE):
            step = block if name != "codes" else matrix.format.codes_per_byte
            tensors[name] = tensor[..., start // step : -(-stop // step)].contiguous()
    return matrix.with_tensors(tensors, (*matrix.shape[:-1], stop - start))
