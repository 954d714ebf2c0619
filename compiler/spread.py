"""The same work on several items, on all the cores that this process has."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from shipway.compiler.forked import Helper, Outcome, attempt, cores, forked, may_fork

Item = TypeVar("Item")
Result = TypeVar("Result")

NUMBER_BYTES = 4
"""Of an item's number in the queue."""
MOST_ITEMS = 2**14
"""That a pipe holds the numbers of: 64 KiB on Linux."""


def spread(
    work: Callable[[Item], Result], items: Sequence[Item], meanwhile: Callable[[], object] | None = None
) -> list[Result]:
    """`work` of every item, in their order; whoever is free takes the next, this process too.

    While others are still at work and nothing is left to take, this process does what it can `meanwhile`.
    Where a fork is not safe (other threads may hold locks) or not worth it, all is done here. Raises what
    the work of the first item that failed raised.
    """
    count = min(cores(), len(items))
    if count < 2 or len(items) > MOST_ITEMS or not may_fork():
        return [work(item) for item in items]
    queue = _queue(len(items))
    helpers: list[Helper[dict[int, Outcome[Result]]]] = []
    try:
        for _ in range(count - 1):
            helpers.append(forked(lambda: _taken(work, items, queue)))
        done = _taken(work, items, queue)
        if meanwhile is not None:
            meanwhile()
        for helper in helpers:
            done |= helper.result()
    finally:
        os.close(queue)
        for helper in helpers:
            helper.end()
    return [done[number].value() for number in range(len(items))]


def _queue(size: int) -> int:
    """A pipe that holds the numbers of all items; each is read once, by whoever reads first."""
    queue, filled = os.pipe()
    os.write(filled, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(size)))
    os.close(filled)
    return queue


def _taken(work: Callable[[Item], Result], items: Sequence[Item], queue: int) -> dict[int, Outcome[Result]]:
    """Outcomes of what was taken from the queue until it was empty, by number."""
    done: dict[int, Outcome[Result]] = {}
    while taken := os.read(queue, NUMBER_BYTES):
        number = int.from_bytes(taken, "big")
        done[number] = attempt(partial(work, items[number]))
    return done
