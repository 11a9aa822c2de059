"""Where long work shows itself: stderr. On a terminal a table that is redrawn in place, elsewhere plain lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from muster.lab.table import Table

if TYPE_CHECKING:
    from rich.live import Live

_REDRAWS_PER_SECOND = 4


class Screen:
    """One of the two ways; whoever works calls both methods and only one of them does something."""

    def __init__(self, live: Live | None) -> None:
        self._live = live

    def line(self, text: str) -> None:
        """A line of its own, where there is no terminal to draw on."""
        if self._live is None:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def draw(self, table: Callable[[], Table], status: str) -> None:
        """The table as it is now, over a line of text, in place of the last one; on a terminal."""
        if self._live is None:
            return
        from rich.console import Group
        from rich.text import Text

        self._live.update(Group(table().renderable(), Text(status, style="dim")))


@contextmanager
def screen() -> Iterator[Screen]:
    """The screen of this process; what was drawn is gone when the work ends, lines stay."""
    if not sys.stderr.isatty():
        yield Screen(None)
        return
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(stderr=True), refresh_per_second=_REDRAWS_PER_SECOND, transient=True) as live:
        yield Screen(live)
