"""Stages' layouts are chosen together: what going from one to the next takes counts."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.operators.base import Parameter
from shipway.compiler.pipeline import make_plan
from shipway.compiler.problem import Problem
from shipway.compiler.reshard import StateTensor, degrees_of, reshardings, shards, state_tensors
from shipway.compiler.search import IN_SEQUENCES, Found, search
from shipway.compiler.sequence import best_sequence, programme
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Plan
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt

costs = st.integers(0, 100).map(float)


@st.composite
def sequences(draw: st.DrawFn) -> tuple[list[list[float]], list[list[list[float]]]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    stages = [[draw(costs) for _ in range(n)] for n in sizes]
    changes = [[[draw(costs) for _ in range(n)] for _ in range(m)] for m, n in pairwise(sizes)]
    return stages, changes


@settings(max_examples=60, deadline=None)
@given(sequences())
def test_no_sequence_is_better(drawn: tuple[list[list[float]], list[list[list[float]]]]) -> None:
    stages, changes = drawn

    def total(choice: tuple[int, ...]) -> float:
        own = sum(stage[i] for stage, i in zip(stages, choice, strict=True))
        return own + sum(change[i][j] for change, (i, j) in zip(changes, pairwise(choice), strict=True))

    chosen = best_sequence([np.array(s) for s in stages], [np.array(c) for c in changes])
    assert total(chosen) == min(map(total, product(*(range(len(stage)) for stage in stages))))


@cache
def small_cluster() -> Cluster:
    return blueprint("tiny").cluster


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(1, 12))
def test_overlaps_of_two_divisions(old: int, new: int) -> None:
    rows = old * new
    saved = [range(i * new, (i + 1) * new) for i in range(old)]
    wanted = [range(i * old, (i + 1) * old) for i in range(new)]
    overlaps = sum(1 for s in saved for w in wanted if set(s) & set(w))
    assert overlaps == old + new - gcd(old, new)
    # The model's figure: every overlap reads a whole saved shard.
    tensor = StateTensor(Parameter("w", (rows, 7)), rows * 7)
    before, after = Layout(data_parallel_shard=old), Layout(data_parallel_shard=new)
    made = reshardings([tensor], small_cluster(), [[before], [after]])[0].between(0, 0)
    assert made.read_bytes == overlaps * 7 * new


def test_the_same_layout_reads_the_state_once_and_replicas_read_again() -> None:
    made = blueprint("tiny")
    tensors = state_tensors(problem_of(made).work, made.training)
    state = sum(tensor.bytes for tensor in tensors)
    apart, replicas = Layout(data_parallel_shard=4), Layout(data_parallel_shard=2, data_parallel_replicate=2)
    (changes,) = reshardings(tensors, made.cluster, [[apart, replicas]] * 2)
    same, other = changes.between(0, 0), changes.between(0, 1)
    assert same.read_bytes == same.state_bytes == state
    assert other.read_bytes == 2 * state
    assert not same.new_job
    assert reshardings(tensors, made.cluster, [[apart], [Layout()]])[0].between(0, 0).new_job


def test_experts_are_cut_along_two_dimensions() -> None:
    expert = Parameter("gate", (8, 24, 16), "expert", "muon")
    assert shards(expert, degrees_of(Layout(data_parallel_shard=16, expert_parallel=4))) == (4, 4, 1)
    assert shards(expert, degrees_of(Layout(data_parallel_shard=4, expert_parallel=4))) == (4, 1, 1)


SLOW = {"cluster.storage": {"write_bandwidth": 1e7, "read_bandwidth": 1e6}}


def two_stages(**changes: object) -> list[tuple[Problem, Found]]:
    made = rebuilt(blueprint("llama31_8b"), {**cluster(16), **changes})
    problems = [problem_of(made, index) for index in range(2)]
    found = [search(p) for p in problems]
    return [(p, f) for p, f in zip(problems, found, strict=True) if f is not None and f.best is not None]


@pytest.mark.parametrize("changes", [{}, SLOW, {**SLOW, "training.objective": "cost"}])
def test_stages_are_chosen_together(changes: dict[str, object]) -> None:
    stages = two_stages(**changes)
    assert len(stages) == 2
    tensors = state_tensors(stages[0][0].work, stages[0][0].blueprint.training)
    is_cost = changes.get("training.objective") == "cost"

    def total(choice: tuple[int, ...]) -> float:
        layouts = [found.candidates.layout(i) for (_, found), i in zip(stages, choice, strict=True)]
        (changes,) = reshardings(tensors, stages[0][0].blueprint.cluster, [[one] for one in layouts])
        between = changes.between(0, 0)
        seconds = [
            float(found.step_seconds[i]) * p.stage.steps * (layout.world_size if is_cost else 1)
            for (p, found), i, layout in zip(stages, choice, layouts, strict=True)
        ]
        return sum(seconds) + (between.device_seconds if is_cost else between.seconds)

    options = [[int(i) for i in found.order[:IN_SEQUENCES]] for _, found in stages]
    together = programme(stages)
    chosen = tuple(found.best for found in together.found if found.best is not None)
    assert total(chosen) == pytest.approx(min(map(total, product(*options))))
    alone = tuple(found.best for _, found in stages if found.best is not None)
    assert total(chosen) <= total(alone)


def test_a_plan_counts_what_lies_between_its_stages() -> None:
    made = make_plan(rebuilt(blueprint("llama31_8b"), {**cluster(16), **SLOW}))
    assert isinstance(made, Plan)
    (change,) = made.changes
    assert (change.before, change.after) == tuple(stage.name for stage in made.stages)
    assert change.seconds == pytest.approx(
        change.write_seconds + change.read_seconds + change.restart_seconds
    )
    assert change.write_seconds == pytest.approx(change.state_bytes / 1e7)
    assert change.read_bytes >= change.state_bytes
    hours = sum(stage.hours for stage in made.stages) + change.seconds / 3600
    assert made.totals.hours == pytest.approx(hours)


def test_one_stage_keeps_its_own_best() -> None:
    own = problem_of(rebuilt(blueprint("tiny"), cluster(4)))
    found = search(own)
    assert found is not None
    alone = programme([(own, found)])
    assert alone.found[0].best == found.best
    assert alone.changes == ()
