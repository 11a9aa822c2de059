"""Quantities as people read them: decimal bytes, counts, times, rates; three or four significant digits."""

from __future__ import annotations

from collections.abc import Sequence

GIB = 1 << 30
GB = 10**9

_STEPS: Sequence[tuple[float, str]] = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def number(value: float) -> str:
    """`396.3 G`, `12.8 k`, `512`."""
    for size, letter in _STEPS:
        if abs(value) >= 0.99995 * size:
            return f"{_digits(value / size)} {letter}"
    return f"{value:.0f}" if float(value).is_integer() else _digits(value)


def size(nbytes: float) -> str:
    """Bytes, `251.1 GB`; GB is 10^9 bytes."""
    if abs(nbytes) >= 0.99995e12:
        return f"{_digits(nbytes / 1e12)} TB"
    for unit, letter in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(nbytes) >= 0.99995 * unit:
            return f"{_digits(nbytes / unit)} {letter}"
    return f"{nbytes:.0f} B"


def exact(count: int) -> str:
    """A whole number with its thousands apart: `30,720`."""
    return f"{count:,}"


def tokens(count: int | str) -> str:
    """`1 token`, `8 tokens`, `1-64 tokens`."""
    return f"{count} token{'' if str(count) == '1' else 's'}"


def time(seconds: float) -> str:
    """`3.25 ms`, `412 us`."""
    for unit, letter in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.9995 * unit:
            return f"{_digits(seconds / unit)} {letter}"
    return "0" if seconds == 0 else f"{seconds * 1e9:.0f} ns"


def percent(part: float, whole: float) -> str:
    """`63 %`, `0.4 %`; empty for nothing of nothing."""
    if whole == 0:
        return ""
    share = 100 * part / whole
    return f"{share:.1f} %" if 0 < share < 0.95 else f"{share:.0f} %"


def _digits(value: float) -> str:
    """Two places below ten, one below a thousand."""
    return f"{value:.2f}" if abs(value) < 9.995 else f"{value:.1f}"
