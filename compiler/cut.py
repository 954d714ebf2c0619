"""Cut models into pipeline chunks: contiguous runs of layers whose slowest is as fast as can be.

Exact, by bisection over the bottleneck (Pinar and Aykanat 2004, section 3.2), for many models at once. Of
the cuts that reach the best bottleneck the one with the lightest early chunks is taken: they hold the most
micro-batches. Costs are whole numbers, so that there are no near-ties.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

RESOLUTION = 64
"""Steps that the heaviest layer's cost is counted in, finer than any cost is known: layouts whose layers
cost alike share a cut."""


def cut(costs: Sequence[int], chunks: int) -> tuple[int, ...]:
    """Boundaries [0, ..., layers] of `chunks` runs of at least one layer that minimise the slowest.

    What comes before the first layer and after the last (embedding, head) belongs to their costs.
    """
    if chunks > len(costs):
        raise ValueError(f"{len(costs)} layers do not fill {chunks} chunks")
    return tuple(cuts(np.array([costs], dtype=np.int64), np.array([chunks]))[0].tolist())


def cuts(costs: Ints, chunks: Ints) -> Ints:
    """Boundaries for each row of `costs` [cuts, layers]: [cuts, most chunks + 1], filled up with `layers`."""
    sums = np.zeros((len(costs), costs.shape[1] + 1), dtype=np.int64)
    np.cumsum(costs, axis=1, out=sums[:, 1:])
    average = -(-sums[:, -1] // chunks)
    heaviest = costs.max(axis=1)
    low = np.maximum(heaviest, average)
    high = average + heaviest  # filled greedily, no chunk exceeds the average by more than one layer
    open_ = np.flatnonzero(low < high)
    while len(open_):
        own = sums[open_]
        middle = (low[open_] + high[open_]) // 2
        starts = _filled(own, chunks[open_], middle)
        fits = starts[-1] == 0
        slowest, following = _snapped(own, starts)
        high[open_] = np.where(fits, slowest, high[open_])
        low[open_] = np.where(fits, low[open_], np.maximum(following, middle + 1))
        open_ = open_[low[open_] < high[open_]]
    starts = _filled(sums, chunks, high)
    most = len(starts) - 1
    # Row i has its boundaries at steps 0 ... chunks[i], last boundary first.
    steps = np.maximum(chunks[:, None] - np.arange(most + 1), 0)
    bounds: Ints = starts[steps, np.arange(len(costs))[:, None]]
    return bounds


def _filled(sums: Ints, chunks: Ints, limit: Ints) -> Ints:
    """Fill chunks greedily from the last layer on: where each begins, [most chunks + 1, cuts].

    Step 0 is the end of the model; a cut's last step is 0 where `limit` sufficed. The chunks before must
    not go without a layer.
    """
    rows, width = sums.shape
    # One increasing list of all rows' sums, so that one search finds every layer's farthest start.
    apart = np.arange(rows)[:, None] * (int(sums[:, -1].max()) + 1)
    wanted = np.maximum(sums - limit[:, None], 0) + apart
    reach = np.searchsorted((sums + apart).ravel(), wanted.ravel())
    first = np.arange(rows) * width
    left = chunks - 1 - np.arange(int(chunks.max()))[:, None]
    # A row that has all its chunks stays where it is.
    left = first + np.where(left < 0, width, left)
    starts = np.empty((len(left) + 1, rows), dtype=np.int64)
    starts[0] = end = first + width - 1
    for step, least in enumerate(left, start=1):
        end = np.minimum(np.maximum(reach[end], least), end)
        starts[step] = end
    result: Ints = starts - first
    return result


def _snapped(sums: Ints, starts: Ints) -> tuple[Ints, Ints]:
    """Of filled chunks, the slowest, and the smallest that a chunk would be with one layer more."""
    rows = np.arange(len(sums))
    at = sums[rows, starts]
    longer = at[:-1] - sums[rows, np.maximum(starts[1:] - 1, 0)]
    done = starts[1:] == starts[:-1]
    return (at[:-1] - at[1:]).max(axis=0), np.where(done, at[0], longer).min(axis=0)
