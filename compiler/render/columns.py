"""Rows in aligned columns without lines between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, TypeAlias

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.segment import Segment
from rich.style import Style
from rich.text import Text

GAP = 2
"""Spaces between columns."""
HEADER = "bold"
LEAST = 6
"""Columns of text are not wrapped to fewer cells than this."""

Justify = Literal["left", "right"]
Cell: TypeAlias = str | Text


class Columns:
    """What rich's Table shows without a box, in a fraction of the time, and nothing of it is ever cut.

    Text in plain strings is shown as it stands, without markup. Columns on the right are never wrapped, with
    `wrap=False` none is; where they do not fit the width, each row becomes a column or a block of lines.
    """

    def __init__(self, *columns: tuple[str, Justify], wrap: bool = True) -> None:
        self.columns = columns
        self.wrap = wrap
        self.rows: list[tuple[tuple[Cell, ...], str]] = []

    def add_row(self, *cells: Cell, style: str = "") -> None:
        """One row, a cell for each column."""
        self.rows.append((cells, style))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """A line for each row where all fit the console's width; else the widest of the left are wrapped, or
        each row is stacked."""
        rows = [(tuple(name for name, _ in self.columns), HEADER), *self.rows]
        sizes = [[_size(cell) for cell in cells] for cells, _ in rows]
        natural = [max(column) for column in zip(*sizes, strict=True)]
        widths = self._widths(natural, options.max_width)
        if widths is None:
            turned = self._turned(options.max_width)
            yield from [turned] if turned is not None else self._stacked(console, options.max_width)
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

    def _widths(self, natural: list[int], most: int) -> list[int] | None:
        """Columns no wider than `most` together, as rich narrows them; None where wrapping is not enough."""
        widths = [width + GAP for width in natural[:-1]] + natural[-1:]
        left = [number for number, (_, justify) in enumerate(self.columns) if justify == "left"]
        while (excess := sum(widths) - most) > 0:
            widest = max((widths[number] for number in left), default=0)
            next_widest = max((widths[number] for number in left if widths[number] < widest), default=0)
            if widest == next_widest or not self.wrap:
                return None
            # The widest shrink alike, but no further than to the next widest.
            shrinking = [number for number in left if widths[number] == widest]
            for others, number in zip(range(len(shrinking), 0, -1), shrinking, strict=True):
                cut = min(excess, widest - next_widest, round(excess / others))
                widths[number] -= cut
                excess -= cut
        widths = [width - GAP for width in widths[:-1]] + widths[-1:]
        return widths if all(widths[number] >= min(natural[number], LEAST) for number in left) else None

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

    def _turned(self, most: int) -> Columns | None:
        """A column for each row, where these have names and fit."""
        if len(self.rows) < 2 or not all(name for name, _ in self.columns):
            return None
        lines = zip(*(cells for cells, _ in self.rows), strict=True)
        first, *others = ([name, *line] for (name, _), line in zip(self.columns, lines, strict=True))
        turned = Columns(*((cell if isinstance(cell, str) else cell.plain, "left") for cell in first))
        for line in others:
            turned.add_row(*line)
        widest = [max(map(_size, column)) for column in zip(first, *others, strict=True)]
        return turned if sum(widest) + GAP * (len(widest) - 1) <= most else None

    def _stacked(self, console: Console, most: int) -> RenderResult:
        """Each row as a block of lines, one for each cell: its column's name, and the whole of it."""
        label = max(cell_len(name) for name, _ in self.columns) + GAP
        for number, (cells, row_style) in enumerate(self.rows):
            if number:
                yield Segment.line()
            style = console.get_style(row_style) if row_style else None
            for (name, _), cell in zip(self.columns, cells, strict=True):
                if _size(cell):
                    yield from self._block(console, name, cell, style, label, most)

    def _block(
        self, console: Console, name: str, cell: Cell, style: Style | None, label: int, most: int
    ) -> RenderResult:
        """A cell beside its column's name, or below it where a word of it would be broken."""
        text = Text(cell) if isinstance(cell, str) else cell
        beside = bool(name) and label + max(map(cell_len, text.plain.split()), default=0) <= most
        if name and not beside:
            yield from Text(name[:most], style=HEADER).render(console, end="\n")
        indent = label if beside else 0
        shown = name if beside else ""
        for line in text.wrap(console, most - indent, justify="left", overflow="fold"):
            yield Segment(shown.ljust(indent), console.get_style(HEADER))
            yield from Segment.apply_style(line.render(console), style)
            yield Segment.line()
            shown = ""


def _wrapped(console: Console, cell: Cell, size: int, width: int) -> Sequence[Cell]:
    """The lines that a cell takes."""
    if size <= width:
        return [cell]
    text = Text(cell) if isinstance(cell, str) else cell
    return list(text.wrap(console, width, justify="left", overflow="fold"))


def _size(cell: Cell) -> int:
    return cell_len(cell) if isinstance(cell, str) else cell.cell_len
