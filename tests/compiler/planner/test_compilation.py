"""What a plan says of compiled blocks, and which layouts it leaves out for them."""

from __future__ import annotations

from shipway.compiler.compose import compose
from shipway.compiler.pipeline import make_plan
from shipway.compiler.validate import validate
from shipway.schemas.plan import Plan
from tests.blueprints.test_blueprints import valid


def test_compiled_blocks_are_planned_as_eager_ones_without_tensor_parallel_and_say_so() -> None:
    plan = make_plan(valid("tiny", "training.compile=blocks"))
    assert isinstance(plan, Plan)
    assert all(stage.layout.tensor_parallel == 1 for stage in plan.stages)
    assert sum("compiled blocks are planned as if" in warning for warning in plan.warnings) == 1


def test_tensor_parallel_pinned_for_compiled_blocks_is_refused_where_it_is_pinned() -> None:
    overrides = ("training.compile=blocks", "training.layout={tensor_parallel: 2}")
    blueprint, (diagnostic, *_) = validate(compose("tiny", overrides))
    assert blueprint is None or diagnostic.severity == "error"
    assert (
        "tensor_parallel 2 is not possible: it must divide the one rank that a compiled" in diagnostic.summary
    )
    assert validate(compose("tiny", overrides[1:]))[1] == []
