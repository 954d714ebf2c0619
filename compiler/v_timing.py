"""Length of the passes under V-shaped schedules: exact while the pipeline fills and drains, linear between.

The order of every rank is fixed, so that when a pass begins is a maximum over sums of seconds (Baccelli et
al. 1992, chapter 2). It is worked out for many layouts at once, over the actions that the ranks run side
by side. Beyond a few micro-batches every further one only adds the busiest rank's work.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from shipway.compiler.v_orders import KINDS, v_steps
from shipway.schemas.layout import Schedule

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

COLUMN = {"F": 0, "I": 1, "B": 2}
"""Where a pass's seconds stand."""


@dataclass(frozen=True, eq=False)
class _Level:
    """Actions of different ranks that can be timed at once; arrays over the actions."""

    rank: IntArray
    duration: IntArray
    """Column of forward, input and whole backward seconds, chunks after one another."""
    needs: IntArray
    """Slot whose end it waits for; 0 for none."""
    sent: IntArray
    """1 where what it waits for comes from another rank."""
    slot: IntArray
    weights: IntArray
    """[2, actions]: weight parts that follow it on its rank, of the rank's first and second chunk."""


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
    for count in np.unique(exact):
        rows = exact == count
        levels, slots = _levels(schedule, pp, int(count))
        seconds[rows] = _run(levels, slots, durations[rows], deferred[rows], send[rows])
    result: FloatArray = seconds + (micro_batches - exact) * busiest
    return result


def v_least_seconds(
    forward: FloatArray, backward: FloatArray, send: FloatArray, micro_batches: IntArray
) -> FloatArray:
    """No more than `v_seconds`: every rank does its work once the first micro-batch has come down to it."""
    pp = forward.shape[1] // 2
    both = forward + backward
    work = both[:, :pp] + both[:, : pp - 1 : -1]
    down = np.cumsum(forward[:, :pp], axis=1) - forward[:, :pp] + send[:, None] * np.arange(pp)
    result: FloatArray = (down + micro_batches[:, None] * work).max(axis=1)
    return result


def _run(
    levels: tuple[_Level, ...], slots: int, durations: FloatArray, deferred: FloatArray, send: FloatArray
) -> FloatArray:
    chunks = deferred.shape[1]
    done = np.zeros((len(durations), slots))
    free = np.zeros((len(durations), chunks // 2))
    for level in levels:
        ready = done[:, level.needs] + send[:, None] * level.sent
        end = np.maximum(free[:, level.rank], ready) + durations[:, level.duration]
        done[:, level.slot] = end
        behind = deferred[:, level.rank] * level.weights[0]
        behind += deferred[:, chunks - 1 - level.rank] * level.weights[1]
        free[:, level.rank] = end + behind
    result: FloatArray = free.max(axis=1)
    return result


@lru_cache(maxsize=256)
def _levels(schedule: Schedule, pp: int, micro_batches: int) -> tuple[tuple[_Level, ...], int]:
    """The levels of a schedule, and the number of slots: one for nothing, one per forward and backward."""
    passes = [
        _passes(steps, rank, pp, micro_batches)
        for rank, steps in enumerate(v_steps(schedule, pp, micro_batches))
    ]
    made = bytearray(1 + 4 * pp * micro_batches)
    made[0] = 1
    position, left = [0] * pp, list(range(pp))
    levels = []
    while left:
        taken = [passes[rank][position[rank]] for rank in left if made[passes[rank][position[rank]].needs]]
        for one in taken:
            made[one.slot] = 1
            position[one.rank] += 1
        left = [rank for rank in left if position[rank] < len(passes[rank])]
        rank, duration, needs, sent, slot, first, second = np.array(taken).T
        levels.append(_Level(rank, duration, needs, sent, slot, np.stack([first, second])))
    return tuple(levels), len(made)


class _Pass(NamedTuple):
    """A forward or backward of one rank, and the weight parts that follow it."""

    rank: int
    duration: int
    needs: int
    sent: int
    slot: int
    first_weights: int
    second_weights: int


def _passes(steps: IntArray, rank: int, pp: int, micro_batches: int) -> list[_Pass]:
    """What a rank does, as columns and slots."""
    chunks, result = 2 * pp, []
    weights = [0, 0]
    for index, own, number in reversed(steps.tolist()):
        kind = KINDS[index]
        if kind == "W":
            weights[own] += 1
            continue
        chunk = chunks - 1 - rank if own else rank
        source = chunk - 1 if kind == "F" else chunk + 1
        backward = kind != "F"
        outside = not 0 <= source < chunks
        result.append(
            _Pass(
                rank=rank,
                duration=COLUMN[kind] * chunks + chunk,
                needs=0 if outside else 1 + (backward * chunks + source) * micro_batches + number,
                sent=int(not outside and source + chunk != chunks - 1),
                slot=1 + (backward * chunks + chunk) * micro_batches + number,
                first_weights=weights[0],
                second_weights=weights[1],
            )
        )
        weights = [0, 0]
    return result[::-1]
