"""A table in sections: coloured and fitted to the width of a terminal, aligned plain text elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, TextIO

from muster.lab.ledger.evidence import Verdict

if TYPE_CHECKING:
    from rich.console import Group

_GAP = 2

_STYLES: Mapping[str, str] = MappingProxyType(
    {
        verdict.value: "bold red" if verdict.failed else "green" if verdict is Verdict.PROVEN else "yellow"
        for verdict in Verdict
    }
)


@dataclass(frozen=True)
class Column:
    """A heading, and the side that its cells stand on."""

    title: str
    right: bool = False


@dataclass(frozen=True)
class Section:
    """A heading over rows; a row has a cell for each column of the table."""

    title: str
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Table:
    """Sections that share their columns. The last column may be long: on a terminal it alone is folded.

    A cell that is a verdict's name is coloured on a terminal; colour never says more than the word.
    """

    columns: Sequence[Column]
    sections: Sequence[Section]

    def write(self, stream: TextIO | None = None) -> None:
        """Writes it to `stream` (stdout)."""
        stream = stream or sys.stdout
        if stream.isatty():
            from rich.console import Console

            Console(file=stream).print(self.renderable())
        else:
            stream.write(self.text())
        stream.flush()

    def text(self) -> str:
        """Plain text, one line per row, the sections' rows indented under their headings."""
        return "".join(f"{line}\n" for line in self._lines())

    def renderable(self) -> Group:
        """What rich prints."""
        from rich.console import Group
        from rich.table import Table as Grid
        from rich.text import Text

        parts: list[Text | Grid] = []
        for index, section in enumerate(self.sections):
            grid = Grid(box=None, padding=(0, 0, 0, _GAP), show_header=index == 0, header_style="dim")
            for width, column, last in zip(self._widths(), self.columns, self._is_last(), strict=True):
                grid.add_column(
                    column.title,
                    justify="right" if column.right else "left",
                    min_width=None if last else width,
                    no_wrap=not last,
                    overflow="fold",
                )
            for row in section.rows:
                grid.add_row(*(Text(cell, style=_STYLES.get(cell, "")) for cell in row))
            parts += [Text(section.title, style="bold"), grid]
        return Group(*parts)

    def _lines(self) -> Iterator[str]:
        indent = " " * _GAP
        for index, section in enumerate(self.sections):
            yield section.title
            rows = [[column.title for column in self.columns], *section.rows] if index == 0 else section.rows
            for row in rows:
                cells = (
                    cell.rjust(width) if column.right else cell.ljust(width)
                    for cell, width, column in zip(row, self._widths(), self.columns, strict=True)
                )
                yield (indent + indent.join(cells)).rstrip()

    def _widths(self) -> tuple[int, ...]:
        rows = [[column.title for column in self.columns], *(row for s in self.sections for row in s.rows)]
        return tuple(max(map(len, cells)) for cells in zip(*rows, strict=True))

    def _is_last(self) -> tuple[bool, ...]:
        return tuple(index == len(self.columns) - 1 for index in range(len(self.columns)))
