"""How context parallel crosses delta attention: as pinned, or by which form sends less."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from shipway.compiler.assemble import stage_plan
from shipway.compiler.delta_context import exchanges_heads
from shipway.compiler.layouts import enumerate_layouts
from shipway.compiler.search import search
from shipway.schemas.plan import StagePlan
from tests.compiler.planner.planning import stage_problem


def planned(**pins: Any) -> StagePlan:
    problem = stage_problem("tiny", "cluster=h200_4", pins={"context_parallel": 2, **pins})
    found = search(problem)
    assert found is not None
    return stage_plan(problem, found)


@pytest.mark.parametrize(
    ("form", "sent", "not_sent"),
    [("heads", "delta inputs for heads", "delta state"), ("state", "delta state", "delta inputs for heads")],
)
def test_pinned_form_is_planned_and_its_collectives_alone_are_stated(
    form: str, sent: str, not_sent: str
) -> None:
    stage = planned(delta_context=form)
    names = [line.name for line in stage.communication]
    assert stage.layout.delta_context == form
    assert sent in names
    assert not_sent not in names


def test_states_pass_over_long_slices_and_heads_are_exchanged_of_short_ones() -> None:
    short = stage_problem("tiny", "cluster=h200_4", "training.precision.compute=bf16")
    assert short.space.context == 256
    one, two, four = (np.array([n]) for n in (1, 2, 4))
    assert exchanges_heads(short, one, four, one)  # slices of 64 tokens
    assert not exchanges_heads(short, one, two, one)  # of 128
    assert not exchanges_heads(short, one, one, one)


def test_heads_that_cannot_be_dealt_out_are_not_offered() -> None:
    pins = {"context_parallel": 4, "tensor_parallel": 2}
    free, pinned = (
        stage_problem("tiny", "cluster=h200_8", pins=pins | more).space
        for more in ({}, {"delta_context": "heads"})
    )
    assert pinned.delta_heads == 4
    assert len(enumerate_layouts(free))
    assert not len(enumerate_layouts(pinned))
