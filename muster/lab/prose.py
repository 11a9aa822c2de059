"""Lines of a report: wrapped, with continuations further in."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

from muster.lab.table import Table

WIDTH = 110


def wrapped(text: str, indent: int = 2) -> Iterator[str]:
    """A paragraph in lines of at most WIDTH columns; names are never cut."""
    margin = " " * indent
    yield from textwrap.wrap(
        text,
        WIDTH,
        initial_indent=margin,
        subsequent_indent=f"{margin}  ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def lines(table: Table) -> Iterator[str]:
    """A table's lines."""
    return iter(table.text().splitlines())
