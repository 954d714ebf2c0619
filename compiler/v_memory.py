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

from shipway.compiler.v_orders import v_steps
from shipway.schemas.layout import Schedule

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

HELD = {"F": 1, "B": -1, "I": 0, "W": -1}
WAITING = {"F": 0, "B": 0, "I": 1, "W": -1}
"""How a pass changes the micro-batches that a chunk holds, and of them those between `I` and `W`."""
HELD_WHOLE = {"F": 1, "B": -1, "I": -1, "W": 0}
"""The same when `I` runs all of backward."""


def v_steady(pp: int, micro_batches: IntArray) -> IntArray:
    """The fewest micro-batches that hold as many activations as each of `micro_batches` does."""
    return np.minimum(micro_batches, 2 * pp + 1)


@lru_cache(maxsize=256)
def v_in_flight(schedule: Schedule, pp: int, micro_batches: int, split: bool) -> IntArray:
    """[pp, moments, 4]: micro-batches that a rank's two chunks hold, and those that wait for `W` in each."""
    changes = [
        [("FBIW".index(kind), own, int(rank > 0 or own > 0)) for kind, own, _ in steps]
        for rank, steps in enumerate(v_steps(schedule, pp, micro_batches))
    ]
    held = np.array([(HELD if split else HELD_WHOLE)[kind] for kind in "FBIW"])
    waiting = np.array([WAITING[kind] if split else 0 for kind in "FBIW"])
    moments = []
    for rank_changes in changes:
        kind, own, inner = np.array(rank_changes).T
        columns = [held[kind] * (own == 0), held[kind] * (own == 1)]
        columns += [waiting[kind] * inner * (own == 0), waiting[kind] * inner * (own == 1)]
        moments.append(np.unique(np.cumsum(columns, axis=1), axis=1).T)
    most = max(len(one) for one in moments)
    return np.stack([np.pad(one, ((0, most - len(one)), (0, 0))) for one in moments])


def v_kept(
    schedule: Schedule,
    saved: FloatArray,
    waiting: FloatArray,
    split: npt.NDArray[np.bool_],
    micro_batches: IntArray,
) -> FloatArray:
    """Most bytes that each rank holds, [layouts, pp].

    `saved` and `waiting` [layouts, chunks]: kept by one forward, and added to it between `I` and `W`.
    """
    pp = saved.shape[1] // 2
    each = np.stack([saved[:, :pp], saved[:, : pp - 1 : -1], waiting[:, :pp], waiting[:, : pp - 1 : -1]])
    enough = v_steady(pp, micro_batches)
    result = np.empty((len(saved), pp))
    for count, parts in {(int(c), bool(s)) for c, s in zip(enough, split, strict=True)}:
        rows = (enough == count) & (split == parts)
        points = v_in_flight(schedule, pp, count, parts).astype(float)
        # [ranks, layouts, 4] @ [ranks, 4, moments]
        result[rows] = np.matmul(each[:, rows].transpose(2, 1, 0), points.transpose(0, 2, 1)).max(axis=2).T
    return result
