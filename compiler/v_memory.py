"""What V-shaped schedules hold at the moments that can be a peak.

torch splits a chunk's backward by keeping its whole graph from `I` to `W` (stage_backward_input retains
it): nothing kept by forward is freed before `W`, and the gradients that every weight gradient starts from
are kept beside it. The first chunk has no input to differentiate: its `I` does nothing and its `W` is a
whole backward.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shipway.compiler.memory import worst_of
from shipway.compiler.v_orders import v_steps
from shipway.schemas.layout import Schedule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

# How F, I, W and B change the micro-batches that a chunk holds, and of them those between I and W.
HELD, WAITING = np.array([1, 0, -1, -1]), np.array([0, 1, -1, 0])
HELD_WHOLE = np.array([1, -1, 0, -1])
"""The same when `I` runs all of backward."""


def v_steady(pp: int, micro_batches: IntArray) -> IntArray:
    """The fewest micro-batches that hold as many activations as each of `micro_batches` does."""
    return np.minimum(micro_batches, 2 * pp + 1)


@lru_cache(maxsize=256)
def v_in_flight(schedule: Schedule, pp: int, micro_batches: int, split: bool) -> IntArray:
    """[pp, moments, 4]: micro-batches that a rank's two chunks hold, and those that wait for `W` in each."""
    base = (4 * pp + 4) ** np.arange(4)  # above every count: a moment's four are the digits of one number
    held = HELD if split else HELD_WHOLE
    moments = []
    for rank, steps in enumerate(v_steps(schedule, pp, micro_batches)):
        # [kinds, chunks]: what a step adds to the number.
        waits = [split and rank > 0, split]
        step = held[:, None] * base[:2] + WAITING[:, None] * waits * base[2:]
        numbers = np.sort(np.cumsum(step[steps[:, 0], steps[:, 1]]))
        moments.append(numbers[np.append(True, numbers[1:] > numbers[:-1])])
    most = max(len(one) for one in moments)
    padded = np.zeros((pp, most), dtype=np.int64)
    for row, one in zip(padded, moments, strict=True):
        row[: len(one)] = one
    counts: IntArray = padded[:, :, None] // base % base[1]
    return counts


NOTHING, WHOLE, INPUT = 0, 1, 3
"""Additions in `v_moments`: none, a whole backward of the rank's first chunk (the second's follows it), and
one that frees nothing, as the graph is kept for `W`."""


@lru_cache(maxsize=256)
def v_moments(schedule: Schedule, pp: int, micro_batches: int, split: bool) -> tuple[IntArray, IntArray]:
    """What a rank holds before each of its passes, [pp, moments, 4] as in `v_in_flight`, and what the pass
    adds, [pp, moments]: an index into nothing, whole backwards of both chunks, input parts of both."""
    base = (4 * pp + 4) ** np.arange(5)
    held = HELD if split else HELD_WHOLE
    moments = []
    for rank, steps in enumerate(v_steps(schedule, pp, micro_batches)):
        kind, own = steps[:, 0], steps[:, 1]
        waits = [split and rank > 0, split]
        step = held[:, None] * base[:2] + WAITING[:, None] * waits * base[2:4]
        after = np.cumsum(step[kind, own])
        before = after - step[kind, own]
        whole = WHOLE + own
        input_part = np.where(split, np.where((rank == 0) & (own == 0), NOTHING, INPUT + own), whole)
        weight_part = np.where(split & (rank == 0) & (own == 0), whole, NOTHING)
        added = np.choose(kind, [np.full_like(own, NOTHING), input_part, weight_part, whole])
        moments.append(np.unique(np.concatenate([before + added * base[4], after])))
    most = max(len(one) for one in moments)
    padded = np.zeros((pp, most), dtype=np.int64)
    for row, one in zip(padded, moments, strict=True):
        row[: len(one)] = one
    return padded[:, :, None] // base[:4] % base[1], padded // base[4]


def v_at_worst_moment(
    schedule: Schedule,
    saved: FloatArray,
    waiting: FloatArray,
    whole: FloatArray,
    input_part: FloatArray,
    split: npt.NDArray[np.bool_],
    micro_batches: IntArray,
) -> tuple[FloatArray, FloatArray]:
    """Kept bytes and what a pass adds, [layouts, pp], when each rank has most of both.

    All sizes [layouts, 2, pp]: as in `v_kept`, and what a whole backward of each chunk adds, less what it has
    freed by then, and one that frees nothing.
    """
    pp = saved.shape[2]
    sizes = np.concatenate([saved, waiting], axis=1)
    added = np.concatenate([np.zeros_like(saved[:, :1]), whole, input_part], axis=1)
    enough = v_steady(pp, micro_batches)
    kept, most = np.empty((len(saved), pp)), np.empty((len(saved), pp))
    for count, parts in set(zip(enough.tolist(), split.tolist(), strict=True)):
        rows = (enough == count) & (split == parts)
        moments = v_moments(schedule, pp, count, parts)
        kept[rows], most[rows] = worst_of(sizes[rows], added[rows], *moments)
    return kept, most


def v_kept(
    schedule: Schedule,
    saved: FloatArray,
    waiting: FloatArray,
    split: npt.NDArray[np.bool_],
    micro_batches: IntArray,
) -> FloatArray:
    """Most bytes that each rank holds, [layouts, pp].

    `saved` and `waiting` [layouts, 2, pp], of each rank's chunks on the way down and on the way back: kept by
    one forward, and added to it between `I` and `W`.
    """
    pp = saved.shape[2]
    each = np.stack([saved[:, 0], saved[:, 1], waiting[:, 0], waiting[:, 1]])
    enough = v_steady(pp, micro_batches)
    result = np.empty((len(saved), pp))
    for count, parts in set(zip(enough.tolist(), split.tolist(), strict=True)):
        rows = (enough == count) & (split == parts)
        points = v_in_flight(schedule, pp, count, parts).astype(float)
        # [ranks, layouts, 4] @ [ranks, 4, moments]
        result[rows] = np.matmul(each[:, rows].transpose(2, 1, 0), points.transpose(0, 2, 1)).max(axis=2).T
    return result
