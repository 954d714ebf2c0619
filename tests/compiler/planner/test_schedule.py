"""The schedules against torch's own orders, and the closed forms against step-by-step simulation."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shipway.compiler.schedule import (
    in_flight,
    interleaving_allows,
    pipeline_seconds,
    rank_order,
    simulate,
    steady,
)
from shipway.compiler.simulated import interleaved_seconds

LETTER = {"FORWARD": "F", "FULL_BACKWARD": "B"}


def torch_orders(virtual: int, pp: int, micro_batches: int) -> dict[int, list[tuple[str, int, int]]]:
    from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B

    class Stage:
        """What the schedule's constructor reads of a stage."""

        def __init__(self, index: int) -> None:
            self.stage_index, self.num_stages = index, pp * virtual
            self.group_size, self.group_rank = pp, 0
            self.group, self.device, self.submod = None, None, None
            self.is_first, self.is_last = index == 0, index == pp * virtual - 1
            self.has_backward = True
            self.stage_index_to_group_rank: dict[int, int] = {}

    made = ScheduleInterleaved1F1B(
        [Stage(local * pp) for local in range(virtual)], n_microbatches=micro_batches, loss_fn=lambda *_: None
    )
    return {
        rank: [
            (LETTER[a.computation_type.name], a.stage_index, a.microbatch_index)
            for a in actions
            if a is not None
        ]
        for rank, actions in made.pipeline_order.items()
    }


@pytest.mark.parametrize(
    ("pp", "virtual", "micro_batches"), [(2, 2, 2), (2, 2, 4), (4, 2, 8), (4, 3, 8), (2, 4, 6), (3, 2, 7)]
)
def test_interleaved_orders_are_torchs(pp: int, virtual: int, micro_batches: int) -> None:
    if not interleaving_allows(pp, micro_batches):
        with pytest.raises(ValueError, match="number of rounds"):
            torch_orders(virtual, pp, micro_batches)
        return
    for rank, expected in torch_orders(virtual, pp, micro_batches).items():
        ours = [(a.kind, a.chunk, a.micro_batch) for a in rank_order(pp, virtual, micro_batches, rank)]
        assert ours == expected


shapes = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 20)).filter(
    lambda shape: shape[2] >= shape[0] and interleaving_allows(shape[0], shape[2])
)


@settings(deadline=None)
@given(shape=shapes, weights=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_in_flight_counts_are_those_of_the_order(shape: tuple[int, int, int], weights: list[int]) -> None:
    pp, virtual, micro_batches = shape
    weight = np.array(weights[:virtual])
    points = in_flight(pp, virtual, micro_batches)
    for rank in range(pp):
        held, most = np.zeros(virtual, dtype=int), 0
        for action in rank_order(pp, virtual, micro_batches, rank):
            held[action.chunk // pp] += 1 if action.kind == "F" else -1
            most = max(most, int(held @ weight))
        assert int((points[rank] @ weight).max()) == most


@settings(deadline=None)
@given(shape=shapes, weights=st.lists(st.integers(0, 9), min_size=4, max_size=4))
def test_a_steady_schedule_holds_no_more(shape: tuple[int, int, int], weights: list[int]) -> None:
    pp, virtual, micro_batches = shape
    weight = np.array(weights[:virtual])
    enough = int(steady(pp, virtual, np.array([micro_batches * 9 * pp]))[0])
    assert interleaving_allows(pp, enough)
    peak = [int((p @ weight).max()) for p in in_flight(pp, virtual, enough)]
    assert peak == [int((p @ weight).max()) for p in in_flight(pp, virtual, micro_batches * 9 * pp)]


@settings(deadline=None)
@given(shape=shapes, data=st.data(), send=st.floats(0, 0.5))
def test_what_a_plan_prints_is_the_simulation(
    shape: tuple[int, int, int], data: st.DataObject, send: float
) -> None:
    pp, virtual, count = shape
    seconds = st.lists(st.floats(0.1, 3.0), min_size=pp * virtual, max_size=pp * virtual)
    forward, backward = data.draw(seconds), data.draw(seconds)
    printed = interleaved_seconds(pp, virtual, count, forward, backward, send)
    assert printed == pytest.approx(length(pp, virtual, count, forward, backward, send))


def length(
    pp: int, virtual: int, count: int, forward: list[float], backward: list[float], send: float
) -> float:
    return max(slot.end_seconds for slot in simulate(pp, virtual, count, forward, backward, send))


def closed(
    pp: int, virtual: int, count: int, forward: list[float], backward: list[float], send: float = 0.0
) -> float:
    chunks = [np.array(seconds).reshape(1, virtual, pp) for seconds in (forward, backward)]
    return float(pipeline_seconds(*chunks, np.array([send]), np.array([count]), np.array([pp]))[0])


@settings(deadline=None)
@given(pp=st.integers(1, 6), virtual=st.integers(1, 3), factor=st.integers(1, 6))
def test_equal_chunks_take_the_textbook_time(pp: int, virtual: int, factor: int) -> None:
    # Narayanan et al. 2021, section 2.2: the bubble is (pp - 1) (f + b) / v.
    chunks = pp * virtual
    count = factor * pp
    expected = count * 3.0 * virtual + (pp - 1) * 3.0
    assert length(pp, virtual, count, [1.0] * chunks, [2.0] * chunks, 0.0) == pytest.approx(expected)
    assert closed(pp, virtual, count, [1.0] * chunks, [2.0] * chunks) == pytest.approx(expected)


@settings(max_examples=60, deadline=None)
@given(
    pp=st.integers(2, 6),
    factor=st.integers(2, 6),
    data=st.data(),
    send=st.floats(0, 0.2),
)
def test_unequal_1f1b_is_close_to_the_simulation(
    pp: int, factor: int, data: st.DataObject, send: float
) -> None:
    forward = data.draw(st.lists(st.floats(0.8, 1.2), min_size=pp, max_size=pp))
    backward = [2 * seconds for seconds in forward]
    count = factor * pp
    simulated = length(pp, 1, count, forward, backward, send)
    formula = closed(pp, 1, count, forward, backward, send)
    # Worst found by hill climbing over these ranges: 0.948 (late bottleneck, slow sends) and 1.120 (an
    # early bottleneck hides part of the fill under its own warm-up, which the closed form does not see).
    assert 0.93 * simulated <= formula <= 1.15 * simulated


@settings(max_examples=40, deadline=None)
@given(pp=st.integers(2, 4), virtual=st.integers(2, 3), factor=st.integers(2, 5), data=st.data())
def test_unequal_interleaving_is_within_a_fifth_of_the_simulation(
    pp: int, virtual: int, factor: int, data: st.DataObject
) -> None:
    chunks = pp * virtual
    forward = data.draw(st.lists(st.floats(0.85, 1.15), min_size=chunks, max_size=chunks))
    backward = [2 * seconds for seconds in forward]
    count = factor * pp
    simulated = length(pp, virtual, count, forward, backward, 0.0)
    formula = closed(pp, virtual, count, forward, backward)
    # Worst found by hill climbing over these ranges: 0.927 and 1.150, both at two rounds.
    assert formula == pytest.approx(simulated, rel=0.20)


def test_every_pass_runs_once() -> None:
    slots = simulate(3, 2, 6, [1.0] * 6, [2.0] * 6)
    assert len(slots) == len({(s.action.kind, s.action.chunk, s.action.micro_batch) for s in slots}) == 72
