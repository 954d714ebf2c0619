"""Length of the passes under V-shaped schedules: exact while the pipeline fills and drains, linear between.

The order of every rank is fixed, so that when a pass begins is a maximum over sums of seconds (Baccelli et
al. 1992, chapter 2). It is worked out for many layouts at once, over the actions that the ranks run side
by side. Beyond a few micro-batches every further one only adds the busiest rank's work.
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.unique import distinct
from shipway.compiler.v_orders import KINDS, v_steps
from shipway.schemas.layout import Schedule

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

COLUMN = np.array([0, 1, -1, 2])
"""Of each of KINDS where a pass's seconds stand; `W` has none of its own, it follows a pass."""


@frozen(eq=False)
class _Passes:
    """Forwards and backwards of all ranks, in an order in which none waits for a later one."""

    rank: IntArray
    duration: IntArray
    """Row of forward, input and whole backward seconds, chunks after one another."""
    needs: IntArray
    """The pass whose end it waits for, counted from 1; 0 for none."""
    sent: IntArray
    """1 where what it waits for comes from another rank."""
    weights: IntArray
    """[2, passes]: weight parts that follow it on its rank, of the rank's first and second chunk."""
    levels: tuple[slice, ...]
    """Passes of different ranks that can be timed at once."""


def exact_micro_batches(pp: int) -> int:
    """Micro-batches up to which the length is worked out action by action."""
    return 2 * pp


def v_seconds(
    schedule: Schedule,
    forward: FloatArray,
    backward: FloatArray,
    deferred: FloatArray,
    send: FloatArray,
    micro_batches: IntArray,
) -> FloatArray:
    """Seconds of all passes of a step, [layouts].

    `forward`, `backward` and `deferred`, the part of backward that `W` does, have shape [layouts, chunks].
    """
    pp = forward.shape[1] // 2
    both = forward + backward
    busiest = (both[:, :pp] + both[:, : pp - 1 : -1]).max(axis=1)
    exact = np.minimum(micro_batches, exact_micro_batches(pp))
    seconds = np.empty(len(forward))
    durations = np.concatenate([forward, backward - deferred, backward], axis=1)
    for count in distinct(exact):
        rows = exact == count
        seconds[rows] = _run(_passes(schedule, pp, count), durations[rows], deferred[rows], send[rows])
    result: FloatArray = seconds + (micro_batches - exact) * busiest
    return result


def v_simulated_seconds(
    schedule: Schedule,
    forward: FloatArray,
    backward: FloatArray,
    deferred: FloatArray,
    send: FloatArray,
    micro_batches: int,
) -> float:
    """The same of one layout, [1, chunks], worked out to the last micro-batch."""
    pp = forward.shape[1] // 2
    durations = np.concatenate([forward, backward - deferred, backward], axis=1)
    return float(_run(_passes(schedule, pp, micro_batches), durations, deferred, send)[0])


def v_least_seconds(
    forward: FloatArray,
    backward: FloatArray,
    split: npt.NDArray[np.bool_],
    send: FloatArray,
    micro_batches: IntArray,
    pp: IntArray,
) -> FloatArray:
    """No more than `v_seconds`: every rank does its work once the first micro-batch has come down to it.

    Where backward is not `split`, a rank ends with that of the last micro-batch, which then goes on to the
    ranks before. `forward` and `backward` [layouts, 2, most ranks] are of each rank's chunks, 0 beyond `pp`.
    """
    work, rank = (forward + backward).sum(axis=1), np.arange(forward.shape[2])
    apart = send[:, None] * rank
    down, back = (np.cumsum(way, axis=1) - way + apart for way in (forward[:, 0], backward[:, 0]))
    ends = down + micro_batches[:, None] * work + np.where(split[:, None], 0.0, back)
    result: FloatArray = np.where(rank < pp[:, None], ends, 0.0).max(axis=1)
    return result


def _run(passes: _Passes, durations: FloatArray, deferred: FloatArray, send: FloatArray) -> FloatArray:
    """When the last rank is free; arrays of passes have layouts in their last axis."""
    chunks = deferred.shape[1]
    ranks, mirrored = passes.rank, chunks - 1 - passes.rank
    lasts = durations.T[passes.duration]
    behind = (
        deferred.T[ranks] * passes.weights[0][:, None] + deferred.T[mirrored] * passes.weights[1][:, None]
    )
    on_the_way = send * passes.sent[:, None]
    done = np.zeros((len(ranks) + 1, len(send)))
    free = np.zeros((chunks // 2, len(send)))
    for level in passes.levels:
        begins = done[passes.needs[level]]
        begins += on_the_way[level]
        np.maximum(begins, free[ranks[level]], out=begins)
        ends = done[level.start + 1 : level.stop + 1]
        np.add(begins, lasts[level], out=ends)
        free[ranks[level]] = ends + behind[level]
    result: FloatArray = free.max(axis=0)
    return result


@lru_cache(maxsize=256)
def _passes(schedule: Schedule, pp: int, micro_batches: int) -> _Passes:
    """The passes of a schedule, level by level: each as soon as what it waits for has been timed."""
    own = [
        _of_rank(steps, rank, pp, micro_batches)
        for rank, steps in enumerate(v_steps(schedule, pp, micro_batches))
    ]
    columns = np.concatenate(own, axis=1)
    ends = np.cumsum([passes.shape[1] for passes in own])
    position, slot, needs = ends - [passes.shape[1] for passes in own], columns[2], columns[3]
    made = np.zeros(1 + 4 * pp * micro_batches, dtype=bool)
    made[0] = True
    levels, left = [], np.arange(pp)
    while len(left):
        next_up = position[left]
        taken = made[needs[next_up]]
        levels.append(next_up[taken])
        made[slot[levels[-1]]] = True
        position[left[taken]] += 1
        left = left[position[left] < ends[left]]
    order = np.concatenate(levels)
    place = np.zeros(len(made), dtype=np.int64)
    place[slot[order]] = np.arange(1, len(order) + 1)
    edges = np.cumsum([0, *map(len, levels)]).tolist()
    rank, duration, _, needs, sent, first, second = columns[:, order]
    return _Passes(
        rank=rank,
        duration=duration,
        needs=place[needs],
        sent=sent,
        weights=np.stack([first, second]),
        levels=tuple(slice(*pair) for pair in pairwise(edges)),
    )


def _of_rank(steps: IntArray, rank: int, pp: int, micro_batches: int) -> IntArray:
    """Forwards and backwards of one rank, one a column: rank, duration, slot, slot it needs, whether that
    is sent, and the weight parts of the rank's two chunks that follow it.

    Slot 0 is nothing; then come the forwards of all chunks and their backwards.
    """
    chunks = 2 * pp
    is_pass = steps[:, 0] != KINDS.index("W")
    kind, own, number = steps[is_pass].T
    chunk = np.where(own == 1, chunks - 1 - rank, rank)
    backward = kind != KINDS.index("F")
    source = np.where(backward, chunk + 1, chunk - 1)
    inside = (source >= 0) & (source < chunks)
    slots = 1 + (backward * chunks + np.array([chunk, source])) * micro_batches + number
    # Weight parts up to each pass and to the end: the difference follows it.
    parts = np.cumsum([~is_pass & (steps[:, 1] == 0), ~is_pass & (steps[:, 1] == 1)], axis=1)
    follow = np.diff(np.column_stack([parts[:, is_pass], parts[:, -1]]), axis=1)
    return np.stack(
        [
            np.full_like(chunk, rank),
            COLUMN[kind] * chunks + chunk,
            slots[0],
            np.where(inside, slots[1], 0),
            inside & (source + chunk != chunks - 1),
            *follow,
        ]
    )
