"""V-shaped schedules against torch's own orders; what they hold and take against the orders followed."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.schedule import simulate
from shipway.compiler.v_memory import v_in_flight, v_kept
from shipway.compiler.v_orders import least_micro_batches, v_orders
from shipway.compiler.v_timing import v_seconds
from shipway.schemas.layout import V_SHAPED, Layout, Schedule

LETTER = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}


def torch_schedule(schedule: Schedule, pp: int, micro_batches: int) -> Any:
    from torch.distributed.pipelining.schedules import ScheduleDualPipeV, ScheduleZBVZeroBubble

    class Stage:
        """What the schedule's constructor reads of a stage."""

        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages = index, 2 * pp
            self.group_size, self.group_rank = pp, 0
            self.group, self.device, self.submod = None, None, None
            self.is_first, self.is_last = index == 0, index == 2 * pp - 1
            self.has_backward = True
            self.stage_index_to_group_rank: dict[int, int] = {}

    made = ScheduleZBVZeroBubble if schedule == "zbv" else ScheduleDualPipeV
    return made([Stage(0), Stage(2 * pp - 1)], n_microbatches=micro_batches, loss_fn=lambda *_: None)


@pytest.mark.parametrize("schedule", V_SHAPED)
@pytest.mark.parametrize(("pp", "more"), [(2, 0), (2, 5), (3, 1), (4, 0), (4, 9), (5, 3)])
def test_orders_and_placement_are_torchs(schedule: Schedule, pp: int, more: int) -> None:
    count = least_micro_batches(schedule, pp) + more
    made = torch_schedule(schedule, pp, count)
    for rank, actions in made.pipeline_order.items():
        single = [one for action in actions if action for one in action.sub_actions or (action,)]
        expected = [(LETTER[a.computation_type.name], a.stage_index, a.microbatch_index) for a in single]
        assert [(a.kind, a.chunk, a.micro_batch) for a in v_orders(schedule, pp, count)[rank]] == expected
    layout = Layout(pipeline_parallel=pp, virtual_stages=2, schedule=schedule)
    assert {c: layout.rank_of(c) for c in range(2 * pp)} == made.stage_index_to_group_rank


def test_dualpipev_refuses_fewer_micro_batches_than_chunks_as_torch_does() -> None:
    with pytest.raises(ValueError, match="at least as many microbatches"):
        torch_schedule("dualpipev", 3, least_micro_batches("dualpipev", 3) - 1)


def test_chunks_on_a_rank_come_in_model_order() -> None:
    layout = Layout(pipeline_parallel=3, virtual_stages=2, schedule="zbv")
    assert [layout.chunks_on(rank) for rank in range(3)] == [(0, 5), (1, 4), (2, 3)]


shapes = st.tuples(st.sampled_from(V_SHAPED), st.integers(2, 5), st.integers(0, 12)).map(
    lambda drawn: (drawn[0], drawn[1], least_micro_batches(drawn[0], drawn[1]) + drawn[2])
)
bytes_of_chunks = st.lists(st.integers(0, 9), min_size=10, max_size=10)


@settings(deadline=None, max_examples=60)
@given(shape=shapes, saved=bytes_of_chunks, waiting=bytes_of_chunks, split=st.booleans())
def test_kept_bytes_are_the_most_that_following_the_order_holds(
    shape: tuple[Schedule, int, int], saved: list[int], waiting: list[int], split: bool
) -> None:
    schedule, pp, count = shape
    most = []
    for order in v_orders(schedule, pp, count):
        held, peak = 0, 0
        for action in order:
            chunk = action.chunk
            freed = "BW" if split else "BI"
            held += saved[chunk] * ((action.kind == "F") - (action.kind in freed))
            if split and chunk > 0:  # the first chunk's I does nothing
                held += waiting[chunk] * ((action.kind == "I") - (action.kind == "W"))
            peak = max(peak, held)
        assert held == 0
        most.append(peak)
    arrays = [
        np.array([[part[:pp], part[2 * pp - 1 : pp - 1 : -1]]], dtype=float) for part in (saved, waiting)
    ]
    kept = v_kept(schedule, *arrays, np.array([split]), np.array([count]))
    assert kept[0].tolist() == most


@pytest.mark.parametrize("schedule", V_SHAPED)
def test_every_rank_holds_about_two_chunks_per_rank(schedule: Schedule) -> None:
    # Qi et al. 2023, section 6: the memory of 1F1B's first rank, on every rank; DualPipeV one chunk more.
    held = v_in_flight(schedule, 4, 9, True)[:, :, :2].sum(axis=2).max(axis=1)
    assert held.tolist() == [8 if schedule == "zbv" else 9] * 4


def simulated(
    schedule: Schedule,
    count: int,
    forward: list[float],
    backward: list[float],
    deferred: list[float],
    send: float,
) -> float:
    pp = len(forward) // 2
    slots = simulate(pp, 2, count, forward, backward, send, schedule=schedule, deferred_seconds=deferred)
    return max(slot.end_seconds for slot in slots)


@pytest.mark.parametrize("schedule", V_SHAPED)
@pytest.mark.parametrize("pp", [2, 4, 6])
def test_equal_passes_leave_no_bubble_but_the_way_down(schedule: Schedule, pp: int) -> None:
    # Forward, input and weight part of one second each: rank r begins after r forwards and never waits.
    count, ones = 3 * pp, np.ones((1, 2 * pp))
    expected = count * 6.0 + pp - 1
    assert simulated(schedule, count, [1.0] * 2 * pp, [2.0] * 2 * pp, [1.0] * 2 * pp, 0.0) == expected
    closed = v_seconds(schedule, ones, 2 * ones, ones, np.zeros(1), np.array([count]))
    assert closed[0] == pytest.approx(expected)


@settings(deadline=None, max_examples=40)
@given(shape=shapes, data=st.data(), send=st.floats(0, 0.2))
def test_closed_form_is_exact_for_few_micro_batches_and_close_beyond(
    shape: tuple[Schedule, int, int], data: st.DataObject, send: float
) -> None:
    schedule, pp, count = shape
    draw = st.lists(st.floats(0.7, 1.4), min_size=2 * pp, max_size=2 * pp)
    forward = np.array([data.draw(draw)])
    backward = forward * 2
    deferred = backward * data.draw(st.floats(0, 0.6))
    deferred[0, 0] = data.draw(st.sampled_from([deferred[0, 0], backward[0, 0]]))
    expected = simulated(
        schedule, count, forward[0].tolist(), backward[0].tolist(), deferred[0].tolist(), send
    )
    closed = v_seconds(schedule, forward, backward, deferred, np.array([send]), np.array([count]))
    assert closed[0] == pytest.approx(expected, rel=1e-9 if count <= 2 * pp else 0.08)
