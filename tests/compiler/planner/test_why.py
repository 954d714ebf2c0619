from functools import cache

import pytest

from shipway.compiler.pipeline import make_plan
from shipway.compiler.why import why
from shipway.schemas.layout import LayoutConstraints
from shipway.schemas.plan import Plan
from tests.compiler.planner.planning import blueprint, cluster, rebuilt


@cache
def plan() -> Plan:
    made = make_plan(rebuilt(blueprint("llama31_8b", "cluster=h100_8"), cluster(8)))
    assert isinstance(made, Plan)
    return made


def test_a_slower_layout_is_told_where_it_loses() -> None:
    answer = why(plan(), LayoutConstraints(tensor_parallel=8))[0]
    assert answer.layout is not None
    assert answer.layout.tensor_parallel == 8
    assert answer.step[0].asked > answer.step[0].chosen
    assert "slower" in answer.sentence()
    assert sum(part.asked for part in answer.step[1:]) == pytest.approx(answer.step[0].asked)
    assert sum(part.chosen for part in answer.memory[1:]) == pytest.approx(answer.memory[0].chosen)


def test_an_impossible_layout_gets_the_reason() -> None:
    answer = why(plan(), LayoutConstraints(tensor_parallel=16))[0]
    assert answer.layout is None
    assert "key-value heads" in answer.sentence()


def test_a_layout_that_does_not_fit_says_by_how_much() -> None:
    pins = LayoutConstraints(data_parallel_replicate=8, data_parallel_shard=1, recompute="none")
    answer = why(plan(), pins)[0]
    assert answer.outcome == "does not fit"
    assert answer.layout is not None
    assert answer.layout.data_parallel_replicate == 8
    missing = answer.memory[0].asked - answer.capacity_bytes
    assert f"{missing / 2**30:,.1f} GiB more than the device has" in answer.sentence()
    largest = max(answer.memory[1:], key=lambda part: part.asked)
    assert f"{largest.name} alone take {largest.asked / 2**30:,.1f} GiB" in answer.sentence()
    assert answer.reasons[0].help


def test_the_chosen_layout_answers_with_itself() -> None:
    chosen = plan().stages[0].layout
    pins = LayoutConstraints(
        tensor_parallel=chosen.tensor_parallel,
        data_parallel_shard=chosen.data_parallel_shard,
        recompute=chosen.recompute,
    )
    answer = why(plan(), pins)[0]
    assert answer.outcome == "as good"
    assert "what the plan has" in answer.sentence()


def test_layouts_that_cost_more_are_told_by_their_cost() -> None:
    cheapest = make_plan(
        rebuilt(
            blueprint("llama31_8b", "cluster=h100_8"),
            {**cluster(8), "training.objective": "cost", "cluster.price_per_device_hour": 2.0},
        )
    )
    assert isinstance(cheapest, Plan)
    answer = why(cheapest, LayoutConstraints(tensor_parallel=8))[0]
    assert answer.cost is not None
    assert answer.cost.asked > answer.cost.chosen
    assert "% dearer" in answer.sentence()
