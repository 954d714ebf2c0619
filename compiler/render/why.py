"""Why a layout lost, for a terminal and as data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from shipway.compiler.render import units
from shipway.compiler.render.sentence import Sentence
from shipway.compiler.why import Answer, Difference
from shipway.schemas.layout import LayoutConstraints

PARTS = 5
"""Parts of the step, and of the memory, that a person is shown."""
STYLE = {"illegal": "bold red", "does not fit": "bold red", "worse": "yellow", "as good": "green"}


def render_why(answers: Sequence[Answer]) -> RenderableType:
    """Each stage's answer, and the parts that make the difference."""
    parts: list[RenderableType] = []
    for answer in answers:
        parts += [Text(), *_answer(answer)]
    return Group(*parts)


def _answer(answer: Answer) -> Iterable[RenderableType]:
    yield Sentence(Text.assemble((f"{answer.outcome}  ", STYLE[answer.outcome]), answer.sentence()))
    yield from (Sentence(Text(f"  {line}", style="dim")) for line in _reasons(answer))
    if answer.step and answer.outcome == "worse":
        yield _table("step", answer.step, units.duration)
    if answer.memory and answer.outcome != "as good":
        yield _table("memory of the worst rank", answer.memory, _bytes)


def _reasons(answer: Answer) -> Iterable[str]:
    """What the sentence and the tables do not say already."""
    for number, reason in enumerate(answer.reasons):
        if answer.outcome == "illegal":
            yield from (reason.summary,) if number else ()
            yield from (line for line in reason.because if line not in reason.summary)
        if reason.legal:
            yield f"legal: {', '.join(reason.legal)}"
        if reason.help:
            yield reason.help


def _table(title: str, differences: Sequence[Difference], words: Callable[[float], str]) -> Table:
    """The whole, and the parts that differ most, whichever way."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(title, header_style="bold", overflow="fold")
    for name in ("asked", "plan", "difference"):
        table.add_column(name, justify="right", no_wrap=True, header_style="bold")
    most = sorted(differences[1:], key=lambda part: -abs(part.lost))[:PARTS]
    for part in (differences[0], *(part for part in most if part.lost)):
        sign = "+" if part.lost >= 0 else "-"
        table.add_row(part.name, words(part.asked), words(part.chosen), f"{sign}{words(abs(part.lost))}")
    return table


def _bytes(size: float) -> str:
    return units.gibibytes(size) if size else "0"


def why_json(asked: LayoutConstraints, answers: Sequence[Answer]) -> dict[str, Any]:
    """The answers as data: seconds, bytes and dollars."""
    return {
        "asked": asked.model_dump(mode="json", exclude_none=True),
        "stages": [_stage_json(answer) for answer in answers],
    }


def _stage_json(answer: Answer) -> dict[str, Any]:
    return {
        "stage": answer.stage,
        "outcome": answer.outcome,
        "summary": answer.sentence(),
        "layout": None if answer.layout is None else answer.layout.model_dump(mode="json"),
        "capacity_bytes": answer.capacity_bytes or None,
        "step_seconds": [_difference_json(part) for part in answer.step],
        "memory_bytes": [_difference_json(part) for part in answer.memory],
        "cost": None if answer.cost is None else _difference_json(answer.cost),
        "reasons": [reason.model_dump(mode="json") for reason in answer.reasons],
    }


def _difference_json(part: Difference) -> dict[str, Any]:
    return {"name": part.name, "asked": part.asked, "plan": part.chosen}
