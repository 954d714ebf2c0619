"""Measured beside planned: terms, the one that is off, error distributions, random blueprints."""

from __future__ import annotations

import pytest

from shipway.compiler.campaign import NEAR_LIMIT, Draw, draw
from shipway.compiler.verify import ALLOCATED, GATHERED, RESERVED, REST, STEP, compare, spreads
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout
from shipway.schemas.plan import StagePlan
from shipway.schemas.verification import RankMemory, StageReading
from tests.compiler.planner.planning import blueprint

GIB = 2**30


@pytest.fixture(scope="module")
def cluster() -> Cluster:
    return blueprint("small_h200").cluster


@pytest.fixture(scope="module")
def drawn(cluster: Cluster) -> Draw:
    found = draw(7, 0, cluster, False, None)
    assert found is not None
    return found


def reading(stage: StagePlan, more_bytes: int = 0, slower: float = 1.0) -> StageReading:
    """What a device would give that does as planned, but for these."""
    budget = stage.memory.ranks[0]
    states = {
        category: sum(item.bytes for item in budget.items if item.category == category)
        for category in ("parameters", "optimizer")
    }
    gathered = sum(item.bytes for item in budget.items if item.name == GATHERED)
    rank = RankMemory(
        rank=0,
        pipeline_rank=0,
        allocated_bytes=budget.allocated_bytes + more_bytes,
        reserved_bytes=budget.reserved_bytes,
        outside_bytes=budget.outside_bytes,
        parameter_bytes=states["parameters"] - gathered,
        optimizer_bytes=states["optimizer"] + more_bytes,
    )
    return StageReading(
        build="b",
        plan_hash="",
        stage=stage.name,
        layout=stage.layout,
        outcome="measured",
        ranks=(rank,),
        step_seconds=stage.step_seconds * slower,
    )


def test_a_device_that_does_as_planned_shows_no_error(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    comparison = compare(stage, reading(stage))
    assert {term.name for term in comparison.totals} >= {ALLOCATED, RESERVED, STEP}
    assert all(term.error == pytest.approx(0) for term in comparison.totals)


def test_the_part_that_is_off_by_most_is_named(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    comparison = compare(stage, reading(stage, more_bytes=5 * GIB))
    total, culprit = comparison.total(ALLOCATED), comparison.culprit("bytes")
    assert total is not None
    assert total.error < 0
    assert culprit is not None
    assert culprit.name == "optimizer"
    assert culprit.measured - culprit.planned == pytest.approx(5 * GIB)


def test_a_part_that_is_off_the_other_way_is_no_culprit_and_the_rest_is_a_part(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    passes, update, rest = (stage.step_seconds * share for share in (0.7, 0.01, 0.5))
    slow = reading(stage).model_copy(
        update={
            "step_seconds": passes + update + rest,
            "phase_seconds": {"forward and backward": passes, "update": update},
        }
    )
    comparison = compare(stage, slow)
    total, culprit = comparison.total(STEP), comparison.culprit("seconds")
    assert total is not None
    assert total.error < 0
    assert culprit is not None
    assert culprit.name == REST
    assert culprit.measured == pytest.approx(rest)
    phases = comparison.parts[-3:]
    assert sum(part.planned for part in phases) == pytest.approx(stage.step_seconds)
    assert sum(part.measured for part in phases) == pytest.approx(total.measured)


def test_without_a_part_that_is_off_the_same_way_nothing_is_blamed(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    assert compare(stage, reading(stage, slower=2.0)).culprit("seconds") is None


def test_spreads_give_median_worst_and_how_far_a_plan_was_under_the_truth(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    found = spreads([compare(stage, reading(stage, slower=factor)) for factor in (0.8, 1.0, 1.25)])
    step = next(spread for spread in found if spread.name == STEP)
    assert (step.cases, step.median) == (3, pytest.approx(0.2))
    assert step.worst == pytest.approx(0.25)
    assert step.most_under == pytest.approx(0.2)


def test_a_case_that_was_said_to_fit_and_ran_out_of_memory_is_counted(drawn: Draw) -> None:
    (stage,) = drawn.plan.stages
    failed = StageReading(build="b", plan_hash="", stage=stage.name, layout=Layout(), outcome="out of memory")
    comparison = compare(stage, failed)
    assert comparison.false_fit == (stage.memory.verdict == "fits")
    assert comparison.totals == ()


def test_a_draw_is_the_same_whenever_it_is_drawn(cluster: Cluster, drawn: Draw) -> None:
    again = draw(7, 0, cluster, False, None)
    assert again is not None
    assert again.blueprint == drawn.blueprint
    assert again.plan.hash == drawn.plan.hash


def test_a_draw_near_the_limit_nearly_fills_the_device(cluster: Cluster) -> None:
    found = draw(7, 1, cluster, True, None)
    assert found is not None
    (stage,) = found.plan.stages
    share = max(b.peak_bytes / b.capacity_bytes for b in stage.memory.ranks)
    assert NEAR_LIMIT[0] <= share <= NEAR_LIMIT[1]
