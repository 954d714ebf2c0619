"""Columns show what rich's own table shows."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shipway.compiler.compose import compose
from shipway.compiler.pipeline import make_plan
from shipway.compiler.render.columns import Columns
from shipway.compiler.render.plan import BAR_COLUMNS, _Bar
from shipway.compiler.validate import validate
from shipway.schemas.plan import Plan
from tests.compiler.blueprint_files import WHOLE, write


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


def as_table(made: Columns) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name, justify in made.columns:
        table.add_column(name, justify=justify, no_wrap=justify == "right", overflow="fold")
    for cells, style in made.rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells), style=style)
    return table


@pytest.mark.parametrize("width", range(28, 81, 4))
def test_what_fits_and_what_is_wrapped_look_as_in_a_table(width: int) -> None:
    assert shown(columns(), width) == shown(as_table(columns()), width)


def test_rows_that_do_not_fit_are_stacked_and_nothing_is_cut() -> None:
    assert shown(columns(), 18) == [
        *("name  first", "1.5 GiB", "note  a note of", "      several", "      words", ""),
        *("name  ■ second:", "      [1]", "12 GiB", ""),
        *("3", "note  wide 漢字"),
    ]


@pytest.mark.parametrize("width", range(8, 28))
def test_no_figure_is_lost_however_narrow(width: int) -> None:
    assert "".join("".join(shown(columns(), width)).split()).count("GiB") == 2


def test_a_table_that_may_not_wrap_is_stacked_at_once() -> None:
    made = Columns(("run", "left"), ("state", "left"), wrap=False)
    made.add_row("mini-20261130-190000", "done")
    assert shown(made, 27) == ["run                   state", "mini-20261130-190000  done"]
    assert shown(made, 26) == ["run", "mini-20261130-190000", "state  done"]


def test_rows_that_do_not_fit_become_columns_where_these_do() -> None:
    made = Columns(("stage", "left"), ("tokens", "right"), ("steps", "right"))
    made.add_row("8k", "15.6 T", "929,833")
    made.add_row("128k", "800 B", Text("47,684", style="bold"))
    assert shown(made, 24) == ["stage  tokens    steps", "8k     15.6 T  929,833", "128k    800 B   47,684"]
    made.add_row("1m", "1,000,000 B", "1")
    assert shown(made, 24)[:3] == ["stage   8k", "tokens  15.6 T", "steps   929,833"]
    wide = Columns(("stage", "left"), ("tokens", "right"), ("steps", "right"), ("step", "right"))
    wide.add_row("8k", "15.6 T", "929,833", "8.03 s")
    wide.add_row("128k", "800 B", Text("47,684", style="bold"), "19.61 s")
    assert shown(wide, 25) == [
        *("stage   8k       128k", "tokens  15.6 T   800 B"),
        *("steps   929,833  47,684", "step    8.03 s   19.61 s"),
    ]


def test_no_rows_leave_the_names() -> None:
    assert shown(Columns(("name", "left"), ("size", "right")), 40) == ["name  size"]


def test_the_memory_bar_takes_one_line(tmp_path: Path) -> None:
    write(tmp_path, WHOLE)
    blueprint, _ = validate(compose(str(tmp_path / "mine.yaml")))
    assert blueprint is not None
    plan = make_plan(blueprint, ("mine.yaml",))
    assert isinstance(plan, Plan)
    budget = plan.stages[0].memory.ranks[0]
    for width in (20, 40, 200):
        (line,) = shown(_Bar(budget), width)
        assert len(line) <= min(width, BAR_COLUMNS + len(" 100%"))
        assert line.endswith("%")
