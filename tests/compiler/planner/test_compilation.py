"""What a plan says of compiled blocks."""

from __future__ import annotations

from shipway.compiler.pipeline import make_plan
from shipway.schemas.plan import Plan
from tests.blueprints.test_blueprints import valid


def test_compiled_blocks_are_planned_as_eager_ones_in_every_layout_and_say_so() -> None:
    plan = make_plan(valid("tiny", "training.compile=blocks", "training.layout={tensor_parallel: 2}"))
    assert isinstance(plan, Plan)
    assert all(stage.layout.tensor_parallel == 2 for stage in plan.stages)
    assert sum("compiled blocks are planned as if" in warning for warning in plan.warnings) == 1
