"""Rows in aligned columns without lines between them."""

from __future__ import annotations

from typing import Literal, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between columns."""
HEADER = "bold"

Justify = Literal["left", "right"]
Cell: TypeAlias = str | Text


class Columns:
    """What rich's Table shows without a box, in a fraction of the time where no cell needs to be wrapped.

    Text in plain strings is shown as it stands, without markup.
    """

    def __init__(self, *columns: tuple[str, Justify]) -> None:
        self.columns = columns
        self.rows: list[tuple[tuple[Cell, ...], str]] = []

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """One row, a cell for each column."""
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A line for each row where all fit the console's width, else what rich makes of them."""
        rows = [(tuple(name for name, _ in self.columns), HEADER), *self.rows]
        sizes = [[_size(cell) for cell in cells] for cells, _ in rows]
        widths = [max(column) for column in zip(*sizes, strict=True)]
        if sum(widths) + GAP * (len(widths) - 1) > options.max_width:
            yield self._table()
            return
        for (cells, style), own in zip(rows, sizes, strict=True):
            yield from self._line(console, cells, console.get_style(style) if style else None, own, widths)

    def _line(
        self,
        console: Console,
        cells: tuple[Cell, ...],
        style: Style | None,
        own: list[int],
        widths: list[int],
    ) -> RenderResult:
        gap = 0
        for cell, size, width, (_, justify) in zip(cells, own, widths, self.columns, strict=True):
            before, after = (width - size, 0) if justify == "right" else (0, width - size)
            if gap + before:
                yield Segment(" " * (gap + before), style)
            if isinstance(cell, str):
                yield Segment(cell, style)
            else:
                yield from Segment.apply_style(cell.render(console), style)
            gap = after + GAP
        yield Segment.line()

    def _table(self) -> Table:
        """The same as rich's own table, which wraps cells."""
        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for name, justify in self.columns:
            table.add_column(
                name, justify=justify, no_wrap=justify == "right", header_style=HEADER, overflow="fold"
            )
        for cells, style in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
        return table


def _size(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len
