"""Routers' counters are planned as they lie in the generated module, on every rank."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given

from shipway.compiler.lower import lower
from shipway.compiler.pipeline import make_plan
from shipway.schemas.model import Model
from shipway.schemas.plan import Plan
from tests.compiler.operators.generated import generated
from tests.compiler.operators.models import examples, models
from tests.compiler.planner.planning import blueprint


def module_bytes(model: Model) -> int:
    """Counters of all layers of the generated model."""
    with torch.device("meta"):
        module = generated(model).Model()
    saved = module.state_dict()
    return sum(b.numel() * b.element_size() for name, b in module.named_buffers() if name not in saved)


@examples(10)
@given(models(feed_forward=("experts",)))
def test_the_catalogue_states_what_the_module_has(model: Model) -> None:
    stated = sum(part.buffer_bytes() for _, part in lower(model).placed_parts())
    assert stated == module_bytes(model)


@pytest.mark.parametrize("name", ["small_h200", "tiny"])
def test_a_plan_counts_them(name: str) -> None:
    made = make_plan(blueprint(name))
    assert isinstance(made, Plan)
    expected = module_bytes(made.blueprint.model)
    for stage in made.stages:
        held = [
            sum(item.bytes for item in budget.items if item.name == "routers' counters")
            for budget in stage.memory.ranks
        ]
        assert sum(held) == expected
