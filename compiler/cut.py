"""Cut a model into pipeline chunks: contiguous runs of layers whose slowest is as fast as can be.

Exact, by bisection over the bottleneck with both ends snapped to sums that occur (Pinar and Aykanat 2004,
section 3.2). Of the cuts that reach the best bottleneck the one with the lightest early chunks is taken:
they hold the most micro-batches. Costs are whole numbers, so that there are no near-ties.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, pairwise

RESOLUTION = 64
"""Steps that the heaviest layer's cost is counted in, finer than any cost is known: layouts whose layers
cost alike share a cut."""


def cut(costs: Sequence[int], chunks: int, guess: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Boundaries [0, ..., layers] of `chunks` runs of at least one layer that minimise the slowest.

    What comes before the first layer and after the last (embedding, head) belongs to their costs. A good
    `guess` (boundaries for similar costs) shortens the search and never changes its result.
    """
    layers = len(costs)
    if chunks > layers:
        raise ValueError(f"{layers} layers do not fill {chunks} chunks")
    sums = [0, *accumulate(costs)]
    low = max(max(costs), -(-sums[-1] // chunks))
    best, low = _fill_from_the_back(sums, chunks, low)
    if best is not None:
        return best
    if guess is None:
        # Filled greedily, no chunk exceeds the average by more than one layer.
        best, _ = _fill_from_the_back(sums, chunks, -(-sums[-1] // chunks) + max(costs))
        assert best is not None
        guess = best
    high = _slowest(sums, guess)
    if low < high:
        best, following = _fill_from_the_back(sums, chunks, high - 1)
        low, high = (following, high) if best is None else (low, _slowest(sums, best))
    while low < high:
        bounds, following = _fill_from_the_back(sums, chunks, (low + high) // 2)
        if bounds is None:
            low = following
        else:
            high = _slowest(sums, bounds)
    best, _ = _fill_from_the_back(sums, chunks, high)
    assert best is not None
    return best


def _slowest(sums: list[int], bounds: Sequence[int]) -> int:
    return max([sums[end] - sums[start] for start, end in pairwise(bounds)])


def _fill_from_the_back(sums: list[int], chunks: int, limit: int) -> tuple[tuple[int, ...] | None, int]:
    """Fill chunks greedily from the last; without success, the smallest limit that changes a chunk."""
    end = len(sums) - 1
    bounds = [end]
    following = sums[-1]
    for left in range(chunks - 1, -1, -1):
        start = bisect_left(sums, sums[end] - limit, 0, end)
        if start <= left:
            # The chunks before must not go without a layer; from here on each takes one.
            return (*range(left), left, *reversed(bounds)), limit
        longer = sums[end] - sums[start - 1]
        if longer < following:
            following = longer
        bounds.append(start)
        end = start
    return None, max(following, limit + 1)
