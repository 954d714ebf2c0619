"""Cut a model into pipeline chunks: contiguous runs of layers whose slowest is as fast as can be.

Exact: the bottleneck starts at a lower bound and rises to the next sum at which one more layer fits
somewhere, until the chunks suffice (Pinar and Aykanat 2004, section 3.2). Of the cuts that reach the best
bottleneck the one with the lightest early chunks is taken: they hold the most micro-batches.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def cut(seconds: Sequence[float], chunks: int, before: float = 0.0, after: float = 0.0) -> tuple[int, ...]:
    """Boundaries [0, ..., layers] of `chunks` runs, each of at least one layer, that minimise the slowest.

    `before` is added to the first chunk and `after` to the last (embedding and head).
    """
    layers = len(seconds)
    if chunks > layers:
        raise ValueError(f"{layers} layers do not fill {chunks} chunks")
    costs = list(seconds)
    costs[0] += before
    costs[-1] += after
    sums = [0.0, *accumulate(costs)]
    limit = max(max(costs), sums[-1] / chunks)
    while True:
        bounds, following = _fill_from_the_back(sums, chunks, limit)
        if bounds is not None:
            return bounds
        limit = following


def _fill_from_the_back(sums: list[float], chunks: int, limit: float) -> tuple[tuple[int, ...] | None, float]:
    """Fill chunks greedily from the last; without success, the smallest limit that changes a chunk."""
    slack = limit * 1e-12
    end = len(sums) - 1
    bounds = [end]
    following = float("inf")
    for left in range(chunks - 1, -1, -1):
        # The run may not be so long that the chunks before it go without a layer.
        start = max(bisect_left(sums, sums[end] - limit - slack), left)
        if left == 0 and start > 0:
            following = min(following, sums[end] - sums[start - 1])
            return None, following
        if start > left:
            following = min(following, sums[end] - sums[start - 1])
        bounds.append(start)
        end = start
    return tuple(reversed(bounds)), following
