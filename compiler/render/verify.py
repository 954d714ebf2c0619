"""Measured beside planned, for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shipway.compiler.render import units
from shipway.compiler.render.sentence import Sentence
from shipway.compiler.verify import ALLOCATED, RESERVED, STEP, Comparison, Spread, Term, Unit

CLOSE = 0.05
"""Relative error up to which a term is not marked."""


def render_comparison(comparison: Comparison) -> RenderableType:
    """Every term of one stage, and the one that is furthest off."""
    reading = comparison.reading
    if reading.outcome != "measured":
        return Sentence(Text(f"{reading.build}: {reading.outcome}: {reading.detail}", style="bold red"))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(f"stage {reading.stage}", header_style="bold", overflow="fold")
    for name in ("planned", "measured", "error"):
        table.add_column(name, justify="right", no_wrap=True, header_style="bold")
    for term in comparison.totals:
        table.add_row(Text(term.name, style="bold"), *_cells(term))
    for term in comparison.parts:
        table.add_row(f"  {term.name}", *_cells(term))
    return Group(table, *_culprits(comparison), *_holders(comparison))


def _cells(term: Term) -> tuple[str, str, Text]:
    words = units.gibibytes if term.unit == "bytes" else units.duration
    error = f"{term.error:+.1%}" if term.measured else ""
    return words(term.planned), words(term.measured), Text(error, style="yellow" * (abs(term.error) > CLOSE))


def _culprits(comparison: Comparison) -> Iterable[RenderableType]:
    units_of: tuple[tuple[str, Unit], ...] = ((ALLOCATED, "bytes"), (STEP, "seconds"))
    for name, unit in units_of:
        total, part = comparison.total(name), comparison.culprit(unit)
        if total and abs(total.error) > CLOSE:
            where = f"most of it in {part.name}" if part else "no part that was measured is off that way"
            words = f"{name} is off by {total.error:+.1%}: {where}"
            yield Sentence(Text(words, style="yellow"))


def _holders(comparison: Comparison) -> Iterable[RenderableType]:
    """Lines of code that hold the peak of the first rank."""
    held = comparison.reading.ranks[0].holder_bytes if comparison.reading.ranks else {}
    if held:
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
        table.add_column("held at the peak", header_style="bold", overflow="fold")
        table.add_column("", justify="right", no_wrap=True)
        for line_of_code, size in held.items():
            table.add_row(line_of_code, units.gibibytes(size))
        yield table


def render_spreads(spreads: Sequence[Spread], outcomes: dict[str, int], false_fits: int) -> RenderableType:
    """The error distribution of a campaign."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("figure", header_style="bold")
    for name in ("cases", "median error", "worst", "most under the truth"):
        table.add_column(name, justify="right", no_wrap=True, header_style="bold")
    for spread in spreads:
        errors = (spread.median, spread.worst, spread.most_under)
        table.add_row(spread.name, str(spread.cases), *(f"{error:.1%}" for error in errors))
    counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
    said = f"{counts}; said to fit and ran out of memory: {false_fits}"
    return Group(table, Sentence(Text(said, style="bold red" if false_fits else "")))


def line(comparison: Comparison) -> str:
    """One line of a campaign."""
    reading = comparison.reading
    if reading.outcome != "measured":
        return f"{reading.outcome}, planned as {comparison.verdict}: {reading.detail[:200]}"
    found = (comparison.total(name) for name in (ALLOCATED, RESERVED, STEP))
    return ", ".join(f"{term.name} {term.error:+.1%}" for term in found if term)
