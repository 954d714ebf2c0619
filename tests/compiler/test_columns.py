"""Columns show what rich's own table shows."""

import io
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from shipway.compiler.render.columns import Columns


def shown(part: Any, width: int) -> list[str]:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    with console.capture() as capture:
        console.print(part)
    return [line.rstrip() for line in capture.get().splitlines()]


def columns() -> Columns:
    made = Columns(("name", "left"), ("", "right"), ("note", "left"))
    made.add_row("first", "1.5 GiB", Text("a note of several words", style="dim"))
    made.add_row(Text.assemble(("■ ", "blue"), "second: [1]"), "12 GiB", "", style="dim")
    made.add_row("", "3", "wide 漢字")
    return made


def test_rows_are_aligned_by_column() -> None:
    assert shown(columns(), 60) == [
        "name                    note",
        "first          1.5 GiB  a note of several words",
        "■ second: [1]   12 GiB",
        "                     3  wide 漢字",
    ]


@pytest.mark.parametrize("width", range(4, 81, 4))
def test_what_fits_and_what_is_wrapped_look_as_in_a_table(width: int) -> None:
    assert shown(columns(), width) == shown(columns()._table(), width)


def test_no_rows_leave_the_names() -> None:
    assert shown(Columns(("name", "left"), ("size", "right")), 40) == ["name  size"]
