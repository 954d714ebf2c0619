"""The report: what stands in it, and that it opens anywhere."""

from __future__ import annotations

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from shipway.runtime.charts import make_chart, nice_ticks, thin
from shipway.runtime.memory_watch import Measured, breach
from shipway.runtime.report import compare, try_report, write_report
from shipway.runtime.run_folder import RunFolder
from shipway.schemas.layout import Layout
from shipway.schemas.plan import canonical_json
from tests.runtime.small_plan import small_plan

PLAN = small_plan({"short": 6, "long": 3}, [Layout(data_parallel_shard=2), Layout(data_parallel_shard=2)])


def step(number: int, stage: str, seconds: float, loss: float) -> dict[str, Any]:
    return {
        "stage": stage,
        "step": number,
        "stage_step": number,
        "loss": loss,
        "tokens": 100 * number,
        "step_seconds": seconds,
        "tokens_per_second": 100 / seconds,
        "planned_tokens_per_second": 1e4,
        "mfu": 0.05,
        "data_wait_seconds": 0.5,
        "memory_allocated_bytes": 3 * 2**30,
        "memory_reserved_bytes": 4 * 2**30,
        "planned_memory_allocated_bytes": 2 * 2**30,
        "planned_memory_reserved_bytes": 4 * 2**30,
        "expert_load": {"1": 1.5, "2": 2.5},
    }


STEPS = [step(n, "short", 9.0 if n < 4 else 0.2, 6.0 / n) for n in range(1, 7)]


@pytest.fixture
def page(tmp_path: Path) -> str:
    """The report of a run that failed in its first stage."""
    run = RunFolder(tmp_path)
    (tmp_path / "plan.json").write_text(canonical_json(PLAN))
    evaluation = {
        "event": "evaluation",
        "stage": "short",
        "step": 6,
        "measures": {"held_out/all": 1.25, "needle/depth/0.5": 0.5},
    }
    lines = [*STEPS, evaluation]
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"cut sho')
    run.write_status(state="fatal", reason="rank 1 on <host>: the disk is full", step=6)
    run.write_environment({"torch": "2.13", "parameters": 1000})
    (tmp_path / "checkpoints/step-00000004").mkdir(parents=True)
    return write_report(tmp_path).read_text()


class Tags(HTMLParser):
    """Checks that tags nest, and collects what a page loads."""

    VOID = frozenset({"meta"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.loads += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Nothing stays open."""

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_page_is_whole_and_loads_nothing(page: str) -> None:
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.loads == []
    assert "<script" not in page


def test_words_of_a_failure_are_escaped_and_a_torn_checkpoint_is_named(page: str) -> None:
    assert "rank 1 on &lt;host&gt;: the disk is full" in page
    assert "it was not finished" in page


def test_planned_stands_beside_measured(page: str) -> None:
    rows = re.findall(r"<tr><td class=\"name\">short</td><td class=\"name\">(.*?)</td>(.*?)</tr>", page)
    cells = {name: re.findall(r"<td>(.*?)</td>", rest) for name, rest in rows}
    assert cells["step time, s"] == ["0.1", "0.2", "2.00"], "the slow first steps are left out"
    assert cells["peak memory allocated, GiB"] == ["2.00", "3.00", "1.50"]
    assert cells["model FLOPs utilisation"] == ["10.00%", "5.00%", "0.50"]


def test_stage_that_has_not_begun_has_no_figures() -> None:
    assert compare(PLAN.stages[1], STEPS) == []


def test_run_without_a_plan_has_no_report_and_says_so(tmp_path: Path) -> None:
    assert try_report(tmp_path).startswith("no report: ")


def test_chart_leaves_out_what_is_not_finite_and_stays_inside() -> None:
    chart = make_chart("loss", {"a": [(1, 2.0), (2, math.nan), (3, 1.0)]}, {"s": 1})
    assert chart is not None
    points = [tuple(map(float, pair.split(","))) for pair in chart.curves[0].points.split()]
    assert len(points) == 2
    assert all(chart.left <= x <= chart.width and 0 <= y <= chart.height for x, y in points)
    assert make_chart("empty", {"a": [(1, math.inf)]}, {}) is None


def test_long_curves_are_thinned_but_keep_their_end() -> None:
    points = [(float(i), float(i)) for i in range(5001)]
    kept = thin(points)
    assert len(kept) <= 1300
    assert kept[-1] == points[-1]


def test_ticks_are_round() -> None:
    assert nice_ticks(0.0, 1.0, 5) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert nice_ticks(3.0, 97.0, 5) == [20.0, 40.0, 60.0, 80.0]


def test_memory_breach_names_the_term_that_was_wrong() -> None:
    budget = PLAN.stages[0].memory.ranks[0]  # one MiB of parameters and nothing else
    assert breach(Measured(parameters=2**20, optimizer=0, rest=2**15), budget) is None
    text = breach(Measured(parameters=2**20, optimizer=5 * 2**30, rest=2**20), budget)
    assert text is not None
    assert "the term that was wrong: optimizer, 5.00 GiB against 0.00" in text
