"""Pipeline schedules: order of work, micro-batches in flight, and a step-by-step simulation.

The orders are those of torch.distributed.pipelining: Schedule1F1B and ScheduleInterleaved1F1B, which
follow Narayanan et al. 2021 (arXiv 2104.04473), with chunk c of the model on pipeline rank c mod pp, and
the V-shaped ones of `v_orders`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.v_orders import Action, v_orders
from shipway.schemas.layout import V_SHAPED, Layout, Schedule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]


def rounds(pp: int, micro_batches: int) -> int:
    """Rounds that torch's interleaved schedule deals micro-batches in; they must divide them evenly."""
    return max(1, micro_batches // pp)


def interleaving_allows(pp: int, micro_batches: int) -> bool:
    """Whether ScheduleInterleaved1F1B takes this number of micro-batches."""
    return micro_batches % rounds(pp, micro_batches) == 0


def warmup_forwards(pp: int, virtual: int, micro_batches: int, rank: int) -> int:
    """Forward passes of a rank before its first backward, less the one that pairs with it."""
    if virtual == 1:
        return min(pp - 1 - rank, micro_batches)
    per_round = micro_batches // rounds(pp, micro_batches)
    return min((virtual - 1) * per_round + 2 * (pp - 1 - rank), micro_batches * virtual)


def rank_order(pp: int, virtual: int, micro_batches: int, rank: int) -> tuple[Action, ...]:
    """The actions of one pipeline rank, in order."""
    total = micro_batches * virtual
    per_round = micro_batches // rounds(pp, micro_batches) if virtual > 1 else 1
    seen_forward, seen_backward = [0] * virtual, [0] * virtual

    def forward(index: int) -> Action:
        local = (index // per_round) % virtual if virtual > 1 else 0
        seen_forward[local] += 1
        return Action("F", local * pp + rank, seen_forward[local] - 1)

    def backward(index: int) -> Action:
        local = virtual - 1 - (index // per_round) % virtual if virtual > 1 else 0
        seen_backward[local] += 1
        return Action("B", local * pp + rank, seen_backward[local] - 1)

    warmup = warmup_forwards(pp, virtual, micro_batches, rank)
    actions = [forward(index) for index in range(warmup)]
    for index in range(total - warmup):
        actions += [forward(warmup + index), backward(index)]
    actions += [backward(index) for index in range(total - warmup, total)]
    return tuple(actions)


def orders_of(layout: Layout) -> Sequence[tuple[Action, ...]]:
    """The actions of all pipeline ranks of a layout."""
    pp, count = layout.pipeline_parallel, layout.micro_batches
    if layout.schedule in V_SHAPED:
        return v_orders(layout.schedule, pp, count)
    return [rank_order(pp, layout.virtual_stages, count, rank) for rank in range(pp)]


STEADY_ROUNDS = 6
"""Rounds after which an interleaved schedule's pattern only repeats."""


def steady(pp: int, virtual: int, micro_batches: IntArray) -> IntArray:
    """The fewest micro-batches that hold as many activations as each of `micro_batches` does."""
    if virtual == 1:
        return np.minimum(micro_batches, pp)
    whole = micro_batches % pp == 0
    return np.where(whole, np.minimum(micro_batches, STEADY_ROUNDS * pp), micro_batches)


def in_flight(pp: int, virtual: int, micro_batches: int) -> IntArray:
    """Micro-batches that each chunk of each rank keeps, at every moment that can be a peak.

    Shape [pp, moments, virtual]; the last axis counts the rank's own chunks from its first.
    """
    return backward_moments(pp, virtual, micro_batches)[0]


@lru_cache(maxsize=4096)
def backward_moments(pp: int, virtual: int, micro_batches: int) -> tuple[IntArray, IntArray]:
    """The same, and which of the rank's own chunks begins a backward then, [pp, moments].

    After warm-up every forward pairs with a backward; while both stay in their chunks, one count rises and
    one falls, so that peaks of any weighing lie where either moves on to another chunk. In the end only
    backwards are left.
    """
    if virtual == 1:
        counts = np.minimum(pp - np.arange(pp), micro_batches).reshape(pp, 1, 1)
        return counts, np.zeros((pp, 1), dtype=np.int64)
    per_round = micro_batches // rounds(pp, micro_batches)
    total = micro_batches * virtual
    warmup = np.array([warmup_forwards(pp, virtual, micro_batches, rank) for rank in range(pp)])[:, None]
    last = np.maximum(total - warmup - 1, 0)
    edges = np.arange(2 * virtual + 2) * per_round
    by_backward = np.broadcast_to(np.concatenate([edges, edges - 1]), (pp, 2 * len(edges)))
    forward_edge = (-warmup - 1) % per_round
    by_forward = np.concatenate([forward_edge + edges, forward_edge + edges + 1], axis=1)
    pairs = np.clip(np.concatenate([by_backward, by_forward, last], axis=1), 0, last)
    drained = np.concatenate([total - edges[1:], total - edges - 1])
    drained = np.broadcast_to(drained, (pp, len(drained)))
    pairs = np.clip(np.concatenate([pairs, drained], axis=1), 0, total - 1)
    forwards = np.minimum(warmup + pairs + 1, total)
    local = np.arange(virtual)
    done_forward = _passes_of_chunk(forwards[:, :, None], local, per_round, virtual)
    done_backward = _passes_of_chunk(pairs[:, :, None], virtual - 1 - local, per_round, virtual)
    return done_forward - done_backward, virtual - 1 - (pairs // per_round) % virtual


def _passes_of_chunk(passes: IntArray, position: IntArray, per_round: int, virtual: int) -> IntArray:
    """Of the first `passes` passes, those through the chunk that comes `position`-th in each cycle."""
    cycle = per_round * virtual
    whole, rest = passes // cycle, passes % cycle
    done: IntArray = whole * per_round + np.clip(rest - position * per_round, 0, per_round)
    return done


@frozen
class Slot:
    """One action of the simulated step, with its time."""

    rank: int
    action: Action
    start_seconds: float
    end_seconds: float


def simulate(
    pp: int,
    virtual: int,
    micro_batches: int,
    forward_seconds: Sequence[float],
    backward_seconds: Sequence[float],
    send_seconds: float = 0.0,
    *,
    schedule: Schedule = "1f1b",
    deferred_seconds: Sequence[float] = (),
) -> tuple[Slot, ...]:
    """Run the schedule of all ranks; times are per chunk, in model order. Ends when all work is done.

    `deferred_seconds` is the part of backward that V-shaped schedules leave for `W`.
    """
    layout = Layout(pipeline_parallel=pp, virtual_stages=virtual, schedule=schedule)
    orders = orders_of(layout.model_copy(update={"micro_batches": micro_batches}))
    seconds = {"F": forward_seconds, "B": backward_seconds, "W": deferred_seconds}
    seconds["I"] = [b - w for b, w in zip(backward_seconds, deferred_seconds, strict=False)]
    position, free_at = [0] * pp, [0.0] * pp
    done: dict[tuple[str, int, int], float] = {}
    slots: list[Slot] = []
    remaining = sum(len(order) for order in orders)
    while remaining:
        before = remaining
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                action = order[position[rank]]
                ready = _ready(action, layout, done, send_seconds)
                if ready is None:
                    break
                start = max(free_at[rank], ready)
                free_at[rank] = start + seconds[action.kind][action.chunk]
                done[_passed_on(action), action.chunk, action.micro_batch] = free_at[rank]
                slots.append(Slot(rank, action, start, free_at[rank]))
                position[rank] += 1
                remaining -= 1
        if remaining == before:
            raise ValueError("the schedule waits for itself")
    return tuple(sorted(slots, key=lambda slot: (slot.start_seconds, slot.rank)))


def _passed_on(action: Action) -> str:
    """What an action makes: a hidden state, the gradient of one, or nothing that another waits for."""
    return "B" if action.kind == "I" else action.kind


def _ready(
    action: Action, layout: Layout, done: dict[tuple[str, int, int], float], send_seconds: float
) -> float | None:
    """When the input of an action has arrived; None while its producer has not run."""
    kind, chunk, number = _passed_on(action), action.chunk, action.micro_batch
    if kind == "W":
        return done.get(("B", chunk, number))
    own = 0.0 if kind == "F" else done.get(("F", chunk, number))
    source = chunk + (-1 if kind == "F" else 1)
    if own is None or not 0 <= source < layout.pipeline_parallel * layout.virtual_stages:
        return own
    made = done.get((kind, source, number))
    if made is None:
        return None
    return max(own, made + (send_seconds if layout.rank_of(source) != layout.rank_of(chunk) else 0.0))


def pipeline_seconds(
    forward: FloatArray, backward: FloatArray, send: FloatArray, micro_batches: IntArray, pp: IntArray
) -> FloatArray:
    """Length of the pipelined passes of one step, in closed form over layouts.

    `forward`, `backward` have shape [layouts, chunks of a rank, most ranks]; ranks beyond a layout's `pp`
    do nothing. A micro-batch passes all chunks (the fill and the drain); each further one follows a cycle
    behind. The cycle is the longest of every rank's own work and, for 1F1B, of the round trip below a rank
    over the micro-batches it may have in flight (a maximum cycle mean of the schedule's event graph; Baccelli
    et al. 1992, chapter 3).
    """
    both = forward + backward
    _, virtual, ranks = both.shape
    passed = 2 * (pp - 1) * send
    seconds: FloatArray
    if ranks == 1 and virtual == 1:
        seconds = both[:, 0, 0] * micro_batches
        return seconds
    first = both[:, 0]
    if virtual == 1:
        ahead = np.cumsum(first[:, ::-1], axis=1)[:, ::-1]
        below = np.maximum(pp[:, None] - np.arange(ranks), 1)
        round_trip = (ahead + 2 * send[:, None] * (below - 1)) / below
        cycle = np.maximum(first, round_trip).max(axis=1)
        seconds = first.sum(axis=1) + passed + (micro_batches - 1) * cycle
        return seconds
    busiest = both.sum(axis=1).max(axis=1)
    edge = first.sum(axis=1) - first.max(axis=1)
    seconds = micro_batches * busiest + edge + passed
    return seconds
