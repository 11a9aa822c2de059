"""The CPU's expert layer in one parallel region: gate and up, activation, down, and the weighted sum of the experts.

Every thread takes the same share of rows of every expert, so any routing is balanced, each number is made by exactly
one thread, and the result depends neither on the number of threads nor on the other tokens. Experts are added in
ascending order.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property

from muster.moe.problem import Activation
from muster.native import rows, team
from muster.native.jit import F32, I64, LANES, Emitter, F32x8, Kernel, Target, Value
from muster.native.mathematics import sigmoid
from muster.native.rows import Operands, Rows

_WIDTHS = (4, 2, 1)
"""Tokens that share one decode of a row, most first."""


@dataclass(frozen=True)
class Shape:
    """What one kernel is compiled for.

    Attributes:
        gate_up, down: the rows of one expert's two matrices.
        experts: L, how many lie here.
        first_expert: global id of the first.
        top_k: K.
        activation: between the two products.
        bias: both products have one.
        weight_on_input: the routing weight multiplies the input instead of the output.
    """

    gate_up: Rows
    down: Rows
    experts: int
    first_expert: int
    top_k: int
    activation: Activation
    bias: bool
    weight_on_input: bool

    @cached_property
    def inner_bytes(self) -> int:
        """Bytes of one token's inner vectors `[K, F]`, which all threads share."""
        return 4 * self.top_k * self.down.columns

    @cached_property
    def own_bytes(self) -> tuple[int, int]:
        """Bytes of a thread's own lists and vectors: some whatever T is, some for each token; lines of 64."""
        fixed = 8 * (2 * self.experts + 1) + 2 * _WIDTHS[0] * F32x8.bytes
        each = 8 * self.top_k + (4 * self.gate_up.columns if self.gate_up.packed else 0)
        return -(-fixed // 64) * 64, -(-each // 64) * 64


@dataclass(frozen=True, eq=False)
class _Frame:
    """The values of one call: counts, addresses, and where each list lies in this thread's scratch.

    Attributes:
        starts: int64 `[L + 1]`, where each expert's slots begin in `order`.
        cursors: int64 `[L]`, scratch for filling it.
        order: int64 `[T * K]`, slots sorted by expert.
        dots: float32 `[2, width, 8]`, the products of eight rows of gate and of up.
    """

    thread: Value
    threads: Value
    tokens: Value
    x: Value
    ids: Value
    weights: Value
    out: Value
    inner: Value
    starts: Value
    cursors: Value
    order: Value
    dots: Value
    vectors: Value
    gate_up: Operands
    down: Operands
    gate_up_bias: Value
    down_bias: Value


@cache
def experts_kernel(shape: Shape, target: Target) -> Kernel:
    """Arguments: T, the addresses of x, ids, weights, out, the two scratch parts and the bytes of each thread's own;
    then those of the gate_up rows, of the down rows, of the gate_up bias and of the down bias.
    """
    e = Emitter("experts", target)
    frame = _frame(e, shape)
    _sort_slots(e, shape, frame)
    if shape.gate_up.packed:
        stride = 4 * shape.gate_up.columns
        with e.loop(0, frame.tokens) as token:
            rows.reorder(e, frame.x + token * stride, frame.vectors + token * stride, shape.gate_up.columns)
    _gate_up(e, shape, frame)
    team.barrier(e, frame.threads)
    _down(e, shape, frame)
    return e.compile()


def _frame(e: Emitter, shape: Shape) -> _Frame:
    thread, threads = team.member(e)
    arguments = [e.argument(team.RESERVED + slot) for slot in range(8)]
    tokens, x, ids, weights, out, inner, own, own_bytes = arguments
    starts = own + thread * own_bytes
    cursors = starts + 8 * (shape.experts + 1)
    order = cursors + 8 * shape.experts
    dots = order + tokens * (8 * shape.top_k)
    vectors = dots + 2 * _WIDTHS[0] * F32x8.bytes if shape.gate_up.packed else x
    return _Frame(
        *(thread, threads, tokens, x, ids, weights, out, inner),
        *(starts, cursors, order, dots, vectors),
        gate_up=Operands.of(e, team.RESERVED + 8),
        down=Operands.of(e, team.RESERVED + 12),
        gate_up_bias=e.argument(team.RESERVED + 16),
        down_bias=e.argument(team.RESERVED + 17),
    )


def _sort_slots(e: Emitter, shape: Shape, frame: _Frame) -> None:
    """A counting sort of the slots by local expert; slots of experts elsewhere are left out."""
    slots = frame.tokens * shape.top_k
    zero = e.constant(I64, 0)
    with e.loop(0, shape.experts + 1) as expert:
        e.store(zero, frame.starts + expert * 8)
    with e.loop(0, slots) as slot:
        expert = e.load(I64, frame.ids + slot * 8) - shape.first_expert
        with e.when(expert.compare("<", shape.experts)):
            behind = frame.starts + expert * 8
            e.store(e.load(I64, behind, 8) + 1, behind, 8)
    with e.loop(0, shape.experts) as expert:
        at = frame.starts + expert * 8
        start = e.load(I64, at)
        e.store(start, frame.cursors + expert * 8)
        e.store(start + e.load(I64, at, 8), at, 8)
    with e.loop(0, slots) as slot:
        expert = e.load(I64, frame.ids + slot * 8) - shape.first_expert
        with e.when(expert.compare("<", shape.experts)):
            cursor = frame.cursors + expert * 8
            place = e.load(I64, cursor)
            e.store(slot, frame.order + place * 8)
            e.store(place + 1, cursor)


def _for_each_expert(e: Emitter, shape: Shape, frame: _Frame, body: Callable[[Value, Value, Value], None]) -> None:
    """`body(expert, start, stop)` for each expert, with its part of `order`."""
    with e.loop(0, shape.experts) as expert:
        start = e.load(I64, frame.starts + expert * 8)
        stop = e.load(I64, frame.starts + expert * 8, 8)
        with e.when(start.compare("<", stop)):
            body(expert, start, stop)


def _gate_up(e: Emitter, shape: Shape, frame: _Frame) -> None:
    """Inner vectors, eight of their entries at a time."""
    groups = shape.down.columns // LANES

    def one_expert(expert: Value, start: Value, stop: Value) -> None:
        first = frame.thread * groups // frame.threads
        with e.loop(first, (frame.thread + 1) * groups // frame.threads) as group:
            e.strips(start, stop, _WIDTHS, lambda at, width: _inner(e, shape, frame, expert, group * LANES, at, width))

    _for_each_expert(e, shape, frame, one_expert)


def _inner(e: Emitter, shape: Shape, frame: _Frame, expert: Value, column: Value, at: Value, width: int) -> None:
    """Entries `column` to `column + 7` of the inner vectors of the slots `order[at : at + width]`."""
    slots = [e.load(I64, frame.order + (at + i) * 8) for i in range(width)]
    vectors = [frame.vectors + slot // shape.top_k * (4 * shape.gate_up.columns) for slot in slots]
    halves = (0, shape.down.columns) if shape.activation.gated else (0,)
    half_bytes = _WIDTHS[0] * F32x8.bytes

    with e.loop(0, LANES) as lane:
        for half, offset in enumerate(halves):
            dots = shape.gate_up.dots(shape.gate_up.row(frame.gate_up, column + lane + offset, expert), vectors)
            for i, dot in enumerate(dots):
                e.store(dot, frame.dots + lane * 4, half * half_bytes + i * F32x8.bytes)

    for i, slot in enumerate(slots):
        products = []
        for half, offset in enumerate(halves):
            product = e.load(F32x8, frame.dots, half * half_bytes + i * F32x8.bytes)
            products.append(_finished(e, shape, frame, product, expert, column + offset, slot))
        inner = frame.inner + slot * (4 * shape.down.columns)
        values = activate(e, shape.activation, *products)
        if shape.down.packed:
            rows.scatter(e, values, inner, column)
        else:
            e.store(values, inner + column * 4)


def _finished(e: Emitter, shape: Shape, frame: _Frame, product: Value, expert: Value, row: Value, slot: Value) -> Value:
    """Eight products from row `row` on, with their total scales, the routing weight on the input, and the bias."""
    for lanes in _totals(e, shape.gate_up, frame.gate_up, expert, row):
        product = product * lanes
    if shape.weight_on_input:
        product = product * e.splat(e.load(F32, frame.weights + slot * 4), LANES)
    if shape.bias:
        index = expert * shape.gate_up.rows + row
        product = product + e.load(F32x8, frame.gate_up_bias + index * 4)
    return product


def _totals(e: Emitter, layout: Rows, operands: Operands, expert: Value, row: Value) -> list[Value]:
    if not layout.pieces:
        return []
    if layout.rows // layout.pieces % LANES:
        scales = [layout.total(operands, row + lane, expert) for lane in range(LANES)]
        return [e.gather([scale for scale in scales if scale is not None])]
    total = layout.total(operands, row, expert)
    assert total is not None
    return [e.splat(total, LANES)]


def _down(e: Emitter, shape: Shape, frame: _Frame) -> None:
    """This thread's columns of the output: zero, then each expert's products added in turn."""
    hidden = shape.down.rows
    first = frame.thread * hidden // frame.threads
    last = (frame.thread + 1) * hidden // frame.threads
    with e.loop(0, frame.tokens) as token, e.loop(first, last) as d:
        e.store(e.constant(F32, 0), frame.out + (token * hidden + d) * 4)

    def one_expert(expert: Value, start: Value, stop: Value) -> None:
        with e.loop(first, last) as d:
            e.strips(start, stop, _WIDTHS, lambda at, width: _add_products(e, shape, frame, expert, d, at, width))

    _for_each_expert(e, shape, frame, one_expert)


def _add_products(e: Emitter, shape: Shape, frame: _Frame, expert: Value, d: Value, at: Value, width: int) -> None:
    """Adds an expert's entry `d` to the tokens of the slots `order[at : at + width]`."""
    slots = [e.load(I64, frame.order + (at + i) * 8) for i in range(width)]
    vectors = [frame.inner + slot * (4 * shape.down.columns) for slot in slots]
    dots = shape.down.dots(shape.down.row(frame.down, d, expert), vectors)
    total = shape.down.total(frame.down, d, expert)
    for slot, dot in zip(slots, dots, strict=True):
        y = dot if total is None else dot * total
        if shape.bias:
            y = y + e.load(F32, frame.down_bias + (expert * shape.down.rows + d) * 4)
        if not shape.weight_on_input:
            y = y * e.load(F32, frame.weights + slot * 4)
        at_token = frame.out + (slot // shape.top_k * shape.down.rows + d) * 4
        e.store(e.load(F32, at_token) + y, at_token)


def activate(e: Emitter, activation: Activation, gate: Value, up: Value | None = None) -> Value:
    """The function between the products, by `Activation`'s rules; `up` is None when it is not gated."""
    if up is None:
        positive = e.maximum(gate, 0.0)
        return positive * positive
    if activation.limit is not None:
        gate = e.minimum(gate, activation.limit)
        up = e.minimum(e.maximum(up, -activation.limit), activation.limit)
    if activation.name == "gelu":
        return gate * sigmoid(e, (gate + gate * gate * gate * 0.044715) * (2 * math.sqrt(2 / math.pi))) * up
    if activation.name == "swiglu-oai":
        return gate * sigmoid(e, gate * activation.alpha) * (up + 1.0)
    return gate * sigmoid(e, gate) * up
