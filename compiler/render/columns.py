"""Rows in aligned columns without lines between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Literal, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

if TYPE_CHECKING:
    from rich.table import Table

GAP = 2
"""Spaces between columns."""
HEADER = "bold"

Justify = Literal["left", "right"]
Cell: TypeAlias = str | Text


class Columns:
    """What rich's Table shows without a box, in a fraction of the time.

    Text in plain strings is shown as it stands, without markup.
    """

    def __init__(self, *columns: tuple[str, Justify]) -> None:
        self.columns = columns
        self.rows: list[tuple[tuple[Cell, ...], str]] = []

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """One row, a cell for each column."""
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A line for each row where all fit the console's width; else the widest of the left are wrapped."""
        rows = [(tuple(name for name, _ in self.columns), HEADER), *self.rows]
        sizes = [[_size(cell) for cell in cells] for cells, _ in rows]
        natural = [max(column) for column in zip(*sizes, strict=True)]
        widths = self._widths(natural, options.max_width)
        if widths is None:
            yield self._table()
            return
        for number, ((cells, name), own) in enumerate(zip(rows, sizes, strict=True)):
            style = console.get_style(name) if name else None
            if all(size <= width for size, width in zip(own, widths, strict=True)):
                yield from self._line(console, cells, style, own, widths)
                continue
            wrapped = [_wrapped(console, *each) for each in zip(cells, own, widths, strict=True)]
            # Names stand on the last line of their row, all else on the first.
            lines = list(
                zip_longest(*(reversed(each) if number == 0 else each for each in wrapped), fillvalue="")
            )
            for line in reversed(lines) if number == 0 else lines:
                yield from self._line(console, line, style, [_size(cell) for cell in line], widths)

    def _widths(self, widths: list[int], most: int) -> list[int] | None:
        """Columns no wider than `most` together, as rich narrows them; None where wrapping is not enough."""
        widths = [width + GAP for width in widths[:-1]] + widths[-1:]
        left = [number for number, (_, justify) in enumerate(self.columns) if justify == "left"]
        while (excess := sum(widths) - most) > 0:
            widest = max((widths[number] for number in left), default=0)
            next_widest = max((widths[number] for number in left if widths[number] < widest), default=0)
            if widest == next_widest:
                return None
            # The widest shrink alike, but no further than to the next widest.
            shrinking = [number for number in left if widths[number] == widest]
            for others, number in zip(range(len(shrinking), 0, -1), shrinking, strict=True):
                cut = min(excess, widest - next_widest, round(excess / others))
                widths[number] -= cut
                excess -= cut
        widths = [width - GAP for width in widths[:-1]] + widths[-1:]
        return widths if min(widths[number] for number in left) > 0 else None

    def _line(
        self,
        console: Console,
        cells: Sequence[Cell],
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
        """The same as rich's own table."""
        from rich.table import Table  # seldom needed, and none of the lightest

        table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0))
        for name, justify in self.columns:
            table.add_column(
                name, justify=justify, no_wrap=justify == "right", header_style=HEADER, overflow="fold"
            )
        for cells, style in self.rows:
            table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
        return table


def _wrapped(console: Console, cell: Cell, size: int, width: int) -> Sequence[Cell]:
    """The lines that a cell takes."""
    if size <= width:
        return [cell]
    text = Text(cell) if isinstance(cell, str) else cell
    return list(text.wrap(console, width, justify="left", overflow="fold"))


def _size(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len
