"""Functions of float32 vectors inside kernels."""

from __future__ import annotations

import math

from muster.native.jit import I32, Emitter, Value

_LN2_HIGH = 0.693359375
_LN2_LOW = math.log(2) - _LN2_HIGH
_LARGEST = 87.0
_ROUNDER = 1.5 * 2.0**23


def exp(e: Emitter, x: Value) -> Value:
    """e**x within 2 units in the last place; arguments beyond +-87 count as +-87, so it is never 0 or infinite.

    x = n ln 2 + r with |r| <= ln 2 / 2: a Taylor polynomial in r, and n added to the exponent. A NaN gives a NaN.
    Adding 1.5 * 2**23 rounds to a whole number and leaves it in the low bits.
    """
    x = e.maximum(e.minimum(x, _LARGEST), -_LARGEST)
    shifted = x * (1 / math.log(2)) + _ROUNDER
    whole = shifted - _ROUNDER
    r = x - whole * _LN2_HIGH - whole * _LN2_LOW
    y = e.constant(x.type, 1 / math.factorial(7))
    for degree in range(6, -1, -1):
        y = e.fma(y, r, e.constant(x.type, 1 / math.factorial(degree)))
    exponent = (e.bitcast(shifted, I32.x(x.type.lanes)) + 127) << 23
    return y * e.bitcast(exponent, x.type)


def sigmoid(e: Emitter, x: Value) -> Value:
    """1 / (1 + e**-x)."""
    one = e.constant(x.type, 1)
    return one / (exp(e, x * -1.0) + one)
