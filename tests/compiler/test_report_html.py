"""The HTML report of a plan: golden, self-contained, well-formed, deterministic."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from shipway.compiler.cli.app import run
from shipway.compiler.report_figures import LEFT, RIGHT, WIDTH, gantt_figure, memory_figure
from shipway.compiler.report_html import page
from shipway.compiler.schedule import simulate
from shipway.compiler.timeline import Timeline
from shipway.schemas.plan import Plan
from tests.compiler.blueprint_files import WHOLE, write

GOLDEN = Path(__file__).parents[1] / "golden" / "report"
FORWARD, BACKWARD = [0.2, 0.2, 0.2, 0.25], [0.4, 0.4, 0.4, 0.5]


def frozen_plan() -> Plan:
    """A plan of Llama 3.1 8B over four pipeline ranks, as it was once made: the cost model may move on."""
    return Plan.model_validate_json((GOLDEN / "plan.json").read_text())


def timeline(micro_batches: int = 8) -> Timeline:
    slots = simulate(4, 1, micro_batches, FORWARD, BACKWARD, 0.01)
    end = max(slot.end_seconds for slot in slots)
    return Timeline(slots, 1.0, end, (("optimizer", 0.3),), {}, 0.01)


def report() -> str:
    plan = frozen_plan()
    return page(plan, [timeline() for _ in plan.stages])


def test_report_is_that_of_the_golden_copy(update_golden: bool) -> None:
    golden = GOLDEN / "plan.html"
    if update_golden:
        golden.write_text(report())
    assert report() == golden.read_text(), "if this change is meant, run pytest with --update-golden"


def test_report_needs_nothing_from_outside() -> None:
    assert re.findall(r"https?:|<script|<link|@import|url\(|src=", report()) == []


def test_figures_are_well_formed_and_inside_their_frames() -> None:
    figures = re.findall(r"<svg.*?</svg>", report(), re.DOTALL)
    assert len(figures) == 1 + 4 * len(frozen_plan().stages)
    for text in figures:
        figure = ElementTree.fromstring(text)
        width, height = (float(part) for part in figure.attrib["viewBox"].split()[2:])
        for box in figure.iter("rect"):
            x, y, wide, high = (float(box.attrib[name]) for name in ("x", "y", "width", "height"))
            assert x >= 0
            assert x + wide <= width + 0.5
            assert y >= 0
            assert y + high <= height + 0.5


def test_names_are_escaped() -> None:
    plan = frozen_plan().model_copy(update={"name": "<b>&"})
    text = page(plan, [timeline() for _ in plan.stages])
    assert "<h1>&lt;b&gt;&amp;</h1>" in text


def test_memory_bars_are_as_long_as_the_budget() -> None:
    budgets = frozen_plan().stages[0].memory.ranks
    figure = memory_figure(budgets)
    longest = max(budgets[0].capacity_bytes, *(budget.upper_bytes for budget in budgets))
    for row, budget in enumerate(budgets):
        bars = [rect for rect in figure.rects if rect.y == 8 + 24 * row]
        drawn = max(bar.x + bar.width for bar in bars) - LEFT
        assert drawn == pytest.approx(budget.peak_bytes / longest * (WIDTH - LEFT - RIGHT), abs=0.1)


def test_pipeline_shows_every_pass_or_says_how_much_it_shows() -> None:
    small = gantt_figure(timeline(), 4)
    assert sum(rect.style in ("forward", "backward") for rect in small.rects) == 4 * 8 * 2
    assert any("the whole step" in label.text for label in small.labels)
    large = gantt_figure(timeline(400), 4)
    assert sum(rect.style in ("forward", "backward") for rect in large.rects) == 1200
    assert not any("the whole step" in label.text for label in large.labels)


def test_command_writes_the_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, WHOLE)
    for name in ("first.html", "second.html"):
        assert run(["plan", "mine.yaml", "--quiet", "--html", name]) == 0
    first = (tmp_path / "first.html").read_text()
    assert first == (tmp_path / "second.html").read_text()
    assert "<svg" in first
