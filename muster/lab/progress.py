"""How far long work has come, on stderr: a bar on a terminal, a line for each tenth elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def byte_progress(title: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function to call with bytes done and bytes in all."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True)) as bar:
            task = bar.add_task(title, total=None)
            yield lambda done, total: bar.update(task, completed=done, total=total)
        return

    tenths = 0

    def line(done: int, total: int) -> None:
        nonlocal tenths
        if total and 10 * done // total > tenths:
            tenths = 10 * done // total
            sys.stderr.write(f"{title}: {tenths * 10} %, {done:,} of {total:,} bytes\n")
            sys.stderr.flush()

    yield line
