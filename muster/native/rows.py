"""Dot products of stored rows with float32 vectors: how each format's codes become floats inside a kernel.

Columns go by blocks of 64, eight vectors of eight. Plain and 8-bit formats keep the columns' order. Packed 4-bit codes
come out of the registers in another, the same in every block; there the kernel wants its vectors in that order too.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from muster.formats.codec import decode_scale
from muster.formats.matrix import Meaning, QuantMatrix, Scale
from muster.formats.spec import Element, Format
from muster.native.jit import F32, I8, I16, I32, I64, LANES, Emitter, F32x8, I32x8, Value

BLOCK = 64
FAMILIES = frozenset({"bf16", "f32", "nvfp4", "mxfp4", "fp8-tensor", "fp8-channel", "fp8-block", "int4"})

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
UINT4 = tuple(float(code) for code in range(16))

PACKED_ORDER = tuple(
    32 * g + 16 * part + 4 * q + 2 * odd + high
    for high in (0, 1)
    for part in (0, 1)
    for odd in (0, 1)
    for g in (0, 1)
    for q in range(4)
)
"""The column at each place of a packed block. Bit by bit it turns `g part q q odd high` into `high part odd g q q`."""


def why_not(format: Format) -> str | None:
    """Why no kernel reads rows of this format; None when one does."""
    if format.family not in FAMILIES:
        return f"reads {', '.join(sorted(FAMILIES))}, these are {format.name}"
    if format.family == "int4" and format.block is not None and format.block[1] != 32 and format.block[1] % BLOCK:
        return f"reads int4 groups of 32 or a multiple of {BLOCK}, these have {format.block[1]}"
    return None


@dataclass(frozen=True, eq=False)
class RowData:
    """The tensors a kernel reads, and what they cost beyond the matrix.

    Attributes:
        codes: as stored.
        scales: block scales as stored (e4m3 and e8m0 codes, float32), or empty.
        zeros: int4 zero points, or empty.
        totals: float32 `[..., P]`: what multiplies the whole dot product, one per row piece, or empty.
        nbytes: bytes of those that had to be made.
    """

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    totals: Tensor
    nbytes: int

    @staticmethod
    def of(matrix: QuantMatrix) -> RowData:
        """The data of a matrix `[..., N, K]` whose format `why_not` has nothing against."""
        assert matrix.order is None, "act-order rows are declined"
        empty = torch.empty(0)
        scales = zeros = totals = empty
        family = matrix.format.family
        if family in ("nvfp4", "mxfp4"):
            assert matrix.scale is not None
            scales = matrix.scale.value.contiguous()
        if family == "nvfp4":
            totals = _factors(matrix.global_scale)
        elif family in ("fp8-tensor", "fp8-channel"):
            totals = _factors(matrix.scale).flatten(-2)
        elif family in ("fp8-block", "int4"):
            scales = _factors(matrix.scale)
        if matrix.zero is not None:
            zeros = matrix.zero.contiguous()
        codes = matrix.codes.contiguous()
        stored = {tensor.untyped_storage().data_ptr() for tensor in matrix.tensors.values()}
        made = [t for t in (codes, scales, zeros, totals) if t.untyped_storage().data_ptr() not in stored]
        return RowData(codes, scales, zeros, totals, sum(tensor.nbytes for tensor in made))

    @cached_property
    def addresses(self) -> tuple[int, int, int, int]:
        """Of codes, scales, zeros and totals."""
        return self.codes.data_ptr(), self.scales.data_ptr(), self.zeros.data_ptr(), self.totals.data_ptr()


def _factors(scale: Scale | None) -> Tensor:
    assert scale is not None
    value = decode_scale(scale).contiguous()
    return value if scale.meaning is Meaning.MULTIPLIES else value.reciprocal()


@dataclass(frozen=True, eq=False)
class Operands:
    """Inside a kernel: the addresses of a `RowData`."""

    codes: Value
    scales: Value
    zeros: Value
    totals: Value

    @staticmethod
    def of(e: Emitter, slot: int) -> Operands:
        """The four addresses in the argument slots from `slot` on."""
        return Operands(*(e.argument(slot + number) for number in range(4)))


@dataclass(frozen=True, eq=False)
class Row:
    """Inside a kernel: where one row's codes, block scales and zero points begin."""

    codes: Value
    scales: Value
    zeros: Value


@dataclass(frozen=True)
class BlockScale:
    """What a block of 64 columns is scaled by.

    Attributes:
        factors: none, one, or one for each half of the block's vectors.
        zeros: as many zero points, or none.
    """

    factors: tuple[Value, ...] = ()
    zeros: tuple[Value, ...] = ()


@dataclass(frozen=True)
class Rows:
    """Stored rows as a kernel sees them, their shape and format fixed.

    Attributes:
        format: one `why_not` has nothing against.
        rows, columns: of one matrix, columns a multiple of `BLOCK`.
        pieces: equal row pieces with a total scale each; 0 when there are no totals.
    """

    format: Format
    rows: int
    columns: int
    pieces: int

    @staticmethod
    def of(matrix: QuantMatrix, data: RowData) -> Rows:
        """The rows of a matrix and its data."""
        pieces = data.totals.shape[-1] if data.totals.numel() else 0
        return Rows(matrix.format, matrix.shape[-2], matrix.shape[-1], pieces)

    @property
    def any_height(self) -> Rows:
        """The same for any number of rows of a single matrix: to its kernel only the height of a piece matters."""
        return replace(self, rows=self.rows // self.pieces, pieces=1) if self.pieces else replace(self, rows=1)

    @property
    def packed(self) -> bool:
        """Whether vectors must be in `PACKED_ORDER`."""
        return self.format.element.bits == 4

    def row(self, operands: Operands, number: Value, expert: Value | None = None) -> Row:
        """A row of the matrix, or of one matrix of a stack."""
        index = number if expert is None else expert * self.rows + number
        codes = operands.codes + index * (self.columns * self.format.element.bits // 8)
        if self.format.block is None or self.format.scale is None or (self.pieces and self.format.scale is Element.F32):
            return Row(codes, operands.scales, operands.zeros)
        high, wide = self.format.scale_shape(self.rows, self.columns)
        if self.format.block[0] != 1:
            number = number // self.format.block[0]
            index = number if expert is None else expert * high + number
        scales = operands.scales + index * (wide * self.format.scale.bits // 8)
        return Row(codes, scales, operands.zeros + index * wide)

    def total(self, operands: Operands, number: Value, expert: Value | None = None) -> Value | None:
        """What multiplies the row's dot product, or None."""
        if not self.pieces:
            return None
        piece = number // (self.rows // self.pieces)
        index = piece if expert is None else expert * self.pieces + piece
        return number.emitter.load(F32, operands.totals + index * 4)

    def dots(self, row: Row, vectors: Sequence[Value]) -> list[Value]:
        """The dot product of a row with each vector (by address), the total not applied.

        What is added to what does not depend on how many vectors there are.
        """
        e = row.codes.emitter
        sums = [e.variable(e.constant(F32x8, 0)) for _ in vectors]

        def add(column: Value, blocks: int) -> None:
            for number, scale in enumerate(self._scales(row, column, blocks)):
                totals = self._add_block(row, column + BLOCK * number, scale, vectors, [s.get() for s in sums])
                for variable, total in zip(sums, totals, strict=True):
                    variable.set(total)

        pairs = self.columns // (2 * BLOCK)
        with e.loop(0, pairs) as pair:
            add(pair * (2 * BLOCK), 2)
        if self.columns % (2 * BLOCK):
            add(e.constant(I64, pairs * 2 * BLOCK), 1)
        return [e.sum_lanes(total.get()) for total in sums]

    def _add_block(
        self, row: Row, column: Value, scale: BlockScale, vectors: Sequence[Value], sums: Sequence[Value]
    ) -> list[Value]:
        """The block's two halves are summed apart: two short chains rather than a long one."""
        e = row.codes.emitter
        halves: list[list[Value]] = [[] for _ in vectors]
        for number, weights in enumerate(self._decode(row, column)):
            half = number >> 1 & 1
            if scale.zeros:
                weights = weights - scale.zeros[half % len(scale.zeros)]
            for parts, vector in zip(halves, vectors, strict=True):
                x = e.load(F32x8, vector + column * 4, 4 * LANES * number)
                if len(parts) <= half:
                    parts.append(weights * x)
                else:
                    parts[half] = e.fma(weights, x, parts[half])
        return [
            _scaled_sum(e, first, second, scale.factors, total)
            for (first, second), total in zip(halves, sums, strict=True)
        ]

    def _decode(self, row: Row, column: Value) -> Iterator[Value]:
        """The block's eight vectors of eight codes as floats."""
        e = row.codes.emitter
        match self.format.element:
            case Element.E2M1:
                yield from nibbles(e, row.codes + column // 2, E2M1)
            case Element.UINT4:
                yield from nibbles(e, row.codes + column // 2, UINT4)
            case Element.E4M3:
                for number in range(BLOCK // LANES):
                    yield e4m3(e, e.load(I8.x(LANES), row.codes + column, LANES * number))
            case Element.BF16:
                for number in range(BLOCK // LANES):
                    halfwords = e.load(I16.x(LANES), row.codes + column * 2, 2 * LANES * number)
                    yield e.bitcast(e.extend(halfwords, I32x8) << 16, F32x8)
            case _:
                for number in range(BLOCK // LANES):
                    yield e.load(F32x8, row.codes + column * 4, 4 * LANES * number)

    def _scales(self, row: Row, column: Value, blocks: int) -> list[BlockScale]:
        """The scales of one block, or of two that share an aligned pair of columns."""
        e = row.codes.emitter
        match self.format.family:
            case "nvfp4":
                codes = e.load(I8.x(4 * blocks), row.scales + column // 16)
                scales = e4m3(e, codes, signed=False)
                quarters = [[4 * block + part, 4 * block + 2 + part] for block in range(blocks) for part in (0, 1)]
                factors = [e.shuffle(scales, [low] * 4 + [high] * 4) for low, high in quarters]
                return [BlockScale(tuple(factors[2 * block : 2 * block + 2])) for block in range(blocks)]
            case "mxfp4":
                scales = e8m0(e, e.load(I8.x(2 * blocks), row.scales + column // 32))
                return [BlockScale((_halves(e, scales, block),)) for block in range(blocks)]
            case "int4":
                return [self._int4_scale(row, column + BLOCK * block) for block in range(blocks)]
            case "fp8-block":
                scale = e.splat(e.load(F32, row.scales + column // 128 * 4), LANES)
                return [BlockScale((scale,))] * blocks
            case _:
                return [BlockScale()] * blocks

    def _int4_scale(self, row: Row, column: Value) -> BlockScale:
        assert self.format.block is not None
        e = row.codes.emitter
        group = column // self.format.block[1]
        count = 2 if self.format.block[1] < BLOCK else 1
        scales = e.load(F32.x(count), row.scales + group * 4)
        zeros = e.to_float(e.extend(e.load(I8.x(count), row.zeros + group), I32.x(count)))
        if count == 1:
            return BlockScale((e.splat(scales, LANES),), (e.splat(zeros, LANES),))
        return BlockScale((_halves(e, scales, 0),), (_halves(e, zeros, 0),))


def _scaled_sum(e: Emitter, first: Value, second: Value, factors: tuple[Value, ...], total: Value) -> Value:
    if not factors:
        return total + (first + second)
    if len(factors) == 1:
        return e.fma(first + second, factors[0], total)
    return total + e.fma(first, factors[0], second * factors[1])


def _halves(e: Emitter, scales: Value, block: int) -> Value:
    return e.shuffle(scales, [2 * block] * 4 + [2 * block + 1] * 4)


def nibbles(e: Emitter, address: Value, values: Sequence[float]) -> Iterator[Value]:
    """64 packed codes as the floats of a table, in `PACKED_ORDER`; every table value must be exact in bf16."""
    codes = e.load(I8.x(32), address)
    for packed in (codes, codes >> 4):
        nibble = packed & 15
        for part in (0, 1):
            if e.target.avx2:
                yield from _looked_up(e, nibble, values, part)
            else:
                yield from _selected(e, nibble, values, part)


def _looked_up(e: Emitter, nibble: Value, values: Sequence[float], part: int) -> Iterator[Value]:
    """A byte shuffle finds the two bytes of each bf16; a 32-bit lane then holds two neighbours."""
    bits = [struct.unpack("<I", struct.pack("<f", value))[0] >> 16 for value in values]
    low, high = (
        e.intrinsic("llvm.x86.avx2.pshuf.b", nibble.type, e.constant(nibble.type, table * 2), nibble)
        for table in ([bit & 255 for bit in bits], [bit >> 8 for bit in bits])
    )
    lanes = [side + 16 * g + 8 * part + q for g in (0, 1) for q in range(8) for side in (0, 32)]
    pairs = e.bitcast(e.shuffle(low, lanes, high), I32x8)
    yield e.bitcast(pairs << 16, F32x8)
    yield e.bitcast(pairs & 0xFFFF0000, F32x8)


def _selected(e: Emitter, nibble: Value, values: Sequence[float], part: int) -> Iterator[Value]:
    """The same without instructions of one processor family: a choice among the table's values."""
    for odd in (0, 1):
        lanes = [16 * g + 8 * part + 2 * q + odd for g in (0, 1) for q in range(4)]
        code = e.extend(e.shuffle(nibble, lanes), I32x8)
        found = e.constant(F32x8, values[0])
        for number, value in enumerate(values[1:], 1):
            found = e.select(code.compare("==", number), e.constant(F32x8, value), found)
        yield found


def e4m3(e: Emitter, codes: Value, signed: bool = True) -> Value:
    """e4m3 codes as floats, subnormal ones too; its NaN code is the caller's to refuse."""
    wide = e.extend(codes, I32.x(codes.type.lanes))
    magnitude = wide & 0x7F if signed else wide
    floats = F32.x(codes.type.lanes)
    normal = e.bitcast((magnitude << 20) + (120 << 23), floats)
    value = e.select(magnitude.compare("<", 8), e.to_float(magnitude) * 2.0**-9, normal)
    return e.bitcast(e.bitcast(value, wide.type) | (wide & 0x80) << 24, floats) if signed else value


def e8m0(e: Emitter, codes: Value) -> Value:
    """e8m0 codes as floats; code 0 is the subnormal 2**-127."""
    wide = e.extend(codes, I32.x(codes.type.lanes))
    return e.bitcast(e.maximum(wide << 23, 1 << 22), F32.x(codes.type.lanes))


def reorder(e: Emitter, source: Value, target: Value, columns: int) -> None:
    """Copies a float32 vector into `PACKED_ORDER`."""
    with e.loop(0, columns, BLOCK) as column:
        block = e.load(F32.x(BLOCK), source + column * 4)
        e.store(e.shuffle(block, PACKED_ORDER), target + column * 4)


def scatter(e: Emitter, values: Value, target: Value, column: Value) -> None:
    """Stores eight floats of columns `column` to `column + 7` (`column` a multiple of 8) in `PACKED_ORDER`."""
    base = (column & ~63) + (column >> 5 & 1) * 4 + (column >> 4 & 1) * 16 + (column >> 3 & 1) * 2
    for lane in range(LANES):
        place = (lane & 1) * 32 + (lane >> 1 & 1) * 8 + (lane >> 2)
        e.store(e.lane(values, lane), target + base * 4, 4 * place)
