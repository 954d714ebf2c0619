"""Peaks under a pipeline are those of walking through every rank's own order."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import numpy.typing as npt
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.chunked import chunk
from shipway.compiler.evaluate import backward_of_chunks
from shipway.compiler.layouts import enumerate_layouts
from shipway.compiler.memory import at_worst_moment
from shipway.compiler.schedule import interleaving_allows, rank_order
from shipway.compiler.tables import tables
from shipway.compiler.v_memory import v_at_worst_moment
from shipway.compiler.v_orders import Action, least_micro_batches, v_orders
from shipway.compiler.workload import FIRST, LAST
from shipway.schemas.layout import V_SHAPED, Schedule
from tests.compiler.planner.planning import blueprint, cluster, problem_of, rebuilt

Floats = npt.NDArray[np.float64]

shapes = st.tuples(st.integers(2, 5), st.integers(1, 4), st.integers(2, 20)).filter(
    lambda shape: shape[2] >= shape[0] and interleaving_allows(shape[0], shape[2])
)


def sizes(data: st.DataObject, chunks: int) -> list[int]:
    return data.draw(st.lists(st.integers(0, 30), min_size=chunks, max_size=chunks))


@settings(deadline=None)
@given(shape=shapes, data=st.data())
def test_interleaved_ranks_have_most_where_their_orders_say(
    shape: tuple[int, int, int], data: st.DataObject
) -> None:
    pp, virtual, count = shape
    saved, beyond = sizes(data, pp * virtual), sizes(data, pp * virtual)
    arrays = (np.array([of_chunk], dtype=float).reshape(1, virtual, pp) for of_chunk in (saved, beyond))
    kept, added = at_worst_moment(*arrays, np.array([count]))
    for rank in range(pp):
        held, most = 0, 0
        for action in rank_order(pp, virtual, count, rank):
            if action.kind == "F":
                held += saved[action.chunk]
            else:
                most = max(most, held + beyond[action.chunk])
                held -= saved[action.chunk]
        assert kept[0, rank] + added[0, rank] == most


@settings(deadline=None)
@given(
    schedule=st.sampled_from(V_SHAPED),
    pp=st.integers(2, 4),
    more=st.integers(0, 9),
    split=st.booleans(),
    data=st.data(),
)
def test_ranks_of_v_shaped_schedules_too(
    schedule: Schedule, pp: int, more: int, split: bool, data: st.DataObject
) -> None:
    count = least_micro_batches(schedule, pp) + more
    saved, waiting, whole, part = (sizes(data, 2 * pp) for _ in range(4))
    arrays = (np.array([[x[:pp], x[: pp - 1 : -1]]], dtype=float) for x in (saved, waiting, whole, part))
    kept, added = v_at_worst_moment(schedule, *arrays, np.array([split]), np.array([count]))
    for rank, order in enumerate(v_orders(schedule, pp, count)):
        held, most = 0, 0
        for action in order:
            most = max(most, held + _added(action, whole, part, split))
            held += _change(action, saved, waiting, split)
            most = max(most, held)
        assert kept[0, rank] + added[0, rank] == most


def _added(action: Action, whole: list[int], part: list[int], split: bool) -> int:
    """What a pass adds: the first chunk has no input to differentiate, so all of its backward is in `W`."""
    if action.kind == "F":
        return 0
    if action.kind == "B" or not split:
        return 0 if action.kind == "W" else whole[action.chunk]
    if action.chunk == 0:
        return whole[0] if action.kind == "W" else 0
    return part[action.chunk] if action.kind == "I" else 0


def _change(action: Action, saved: list[int], waiting: list[int], split: bool) -> int:
    held = (action.kind == "F") - (action.kind in ("BW" if split else "BI"))
    waits = (action.kind == "I") - (action.kind == "W") if split and action.chunk > 0 else 0
    return held * saved[action.chunk] + waits * waiting[action.chunk]


def test_a_chunks_backward_is_walked_layer_by_layer() -> None:
    problem = problem_of(rebuilt(blueprint("small_h200"), cluster(8)), pins={"data_parallel_replicate": 1})
    candidates = enumerate_layouts(problem.space)
    candidates = candidates.take(np.flatnonzero(candidates.pp > 1)[::40])
    shared = tables(problem, candidates)
    parts, rows = shared.parts, shared.work.layer_rows
    beyond = parts.beyond(parts.peaks.whole)
    checked = 0
    for _, chunked in chunk(candidates, shared):
        found = backward_of_chunks(chunked)[:, chunked.order]  # in model order again
        for layout, cell in enumerate(chunked.cell):
            policy, bounds = chunked.own.recompute[layout], chunked.bounds[layout]
            saved, added = parts.saved[policy, :, cell], beyond[policy, :, cell]
            for number, (begin, end) in enumerate(pairwise(bounds)):
                alive, most = 0.0, 0.0  # beside what the chunk has kept
                if end == len(rows):
                    most = added[LAST]
                    alive = parts.peaks.head_gradient[cell] - saved[LAST]
                for layer in reversed(range(begin, end)):
                    most = max(most, alive + added[rows[layer]])
                    alive -= saved[rows[layer]]
                if begin == 0:
                    own = added[FIRST] + saved[FIRST] - saved[rows[:end]].sum() - saved[FIRST]
                    most = max(most, own - (saved[LAST] if end == len(rows) else 0))
                np.testing.assert_allclose(found[layout, number], most, rtol=1e-9)
                checked += 1
    assert checked > 100
