"""Every word that a plan prints is explained."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from shipway.compiler.assemble import CATEGORY
from shipway.compiler.evaluate import AXIS_TIME, CATEGORIES
from shipway.compiler.explain import find, find_each
from shipway.compiler.glossary import terms
from shipway.compiler.pipeline import make_plan
from shipway.compiler.render.words import short
from shipway.schemas.plan import Plan
from tests.compiler.planner.planning import blueprint


def printed(plan: Plan) -> Iterator[str]:
    """Names in the tables of a plan."""
    yield from (block.block for block in plan.parameters.blocks)
    for stage in plan.stages:
        layout = stage.layout
        if short(layout) != "one device":
            yield from short(layout).split()
        yield from (layout.recompute, f"ZeRO {layout.zero}", stage.memory.verdict)
        if layout.pipeline_parallel > 1:
            yield layout.schedule
        yield from (item.name for budget in stage.memory.ranks for item in budget.items)
        yield from (item.category for budget in stage.memory.ranks for item in budget.items)
        yield from (item.name for item in stage.time)
        for line in stage.communication:
            yield from (line.name, line.collective, line.axis, line.link, line.algorithm)


@pytest.mark.parametrize("name", ["tiny", "k3"])
def test_every_name_of_a_plan_is_explained(name: str) -> None:
    made = make_plan(blueprint(name))
    assert isinstance(made, Plan)
    assert sorted({word for word in printed(made) if not find(word)}) == []


def test_every_item_that_a_plan_may_have_is_explained() -> None:
    assert [name for name in (*CATEGORY, *CATEGORIES, *AXIS_TIME.values()) if not find(name)] == []


def test_no_word_means_two_terms() -> None:
    words = [word for term in terms().values() for word in (term.name, *term.aliases)]
    assert sorted({word for word in words if words.count(word) > 1}) == []


@pytest.mark.parametrize(
    "word",
    ["VP", "muon", "adamw", "peak_bytes", "upper_bytes", "delta attention", "scale-up", "fragmentation",
     "allocator rounding", "gathered parameters", "communicators"],
)  # fmt: skip
def test_words_of_the_readme_and_of_plans_are_explained(word: str) -> None:
    assert find(word)


def test_a_word_that_is_unknown_does_not_hide_the_others() -> None:
    found, unknown = find_each(["bubble", "nonsense", "step", "time"])
    assert len(found) == 2
    assert unknown == ["nonsense"]
