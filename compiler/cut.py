"""Cut models into pipeline chunks: contiguous runs of layers whose slowest is as fast as can be.

Exact: the bottleneck starts at a lower bound and rises to the next sum at which one more layer fits
somewhere, until the chunks suffice (Pinar and Aykanat 2004, section 3.2). Of the cuts that reach the best
bottleneck the one with the lightest early chunks is taken: they hold the most micro-batches. Many models
(the layers' costs under many layouts) are cut in one call.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

SLACK = 1e-9
"""Sums that differ by less than this share of the whole are equal."""


def cut(sums: Floats, chunks: int) -> Ints:
    """Boundaries [models, chunks + 1] of `chunks` runs of at least one layer that minimise the slowest.

    `sums` are running sums of each model's layer costs, [models, layers + 1], starting at 0; what comes
    before the first layer and after the last belongs to those layers.
    """
    models, layers = len(sums), sums.shape[1] - 1
    if chunks > layers:
        raise ValueError(f"{layers} layers do not fill {chunks} chunks")
    if chunks == 1:
        return np.tile(np.array([0, layers]), (models, 1))
    scaled = sums / sums[:, -1:]
    limit = np.maximum(np.diff(scaled, axis=1).max(axis=1), 1.0 / chunks)
    result = np.empty((models, chunks + 1), dtype=np.int64)
    open_ = np.arange(models)
    while len(open_):
        bounds, following = _fill_from_the_back(scaled[open_], chunks, limit[open_])
        filled = bounds[:, 0] == 0
        result[open_[filled]] = bounds[filled]
        limit[open_[~filled]] = following[~filled]
        open_ = open_[~filled]
    return result


def _fill_from_the_back(scaled: Floats, chunks: int, limit: Floats) -> tuple[Ints, Floats]:
    """Fill chunks greedily from the last; also the smallest limit that would change one of them.

    The first boundary is above 0 where the limit leaves layers over.
    """
    models, columns = scaled.shape
    row = np.arange(models)
    # One sorted array of all models, two apart, lets one binary search serve them all.
    flat = (scaled + 2.0 * row[:, None]).reshape(-1)
    bounds = np.empty((models, chunks + 1), dtype=np.int64)
    bounds[:, -1] = end = np.full(models, columns - 1)
    following = np.full(models, np.inf)
    for left in range(chunks - 1, -1, -1):
        until = scaled[row, end]
        reach = np.maximum(until - limit - SLACK, 0.0)
        start = np.searchsorted(flat, reach + 2.0 * row) - row * columns
        # A run may not be so long that the chunks before it go without a layer.
        start = np.clip(start, left, end - 1)
        longer = until - scaled[row, np.maximum(start - 1, 0)]
        following = np.where(start > left, np.minimum(following, longer), following)
        bounds[:, left] = end = start
    return bounds, following
