"""The same work on several items, on all the cores that this process has."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

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
    Helpers are forked, so that nothing is imported again. Where that is not safe (other threads may hold
    locks) or not worth it, all is done here. Raises what the work of the first item that failed raised.
    """
    count = min(cores(), len(items))
    if count < 2 or len(items) > MOST_ITEMS or not may_fork():
        return [work(item) for item in items]
    queue = _queue(len(items))
    helpers: list[_Helper] = []
    done: dict[int, _Outcome[Result]] = {}
    try:
        for _ in range(count - 1):
            helpers.append(_helper(work, items, queue))
        _take(work, items, queue, done)
        if meanwhile is not None:
            meanwhile()
        for helper in helpers:
            done |= helper.results()
    finally:
        os.close(queue)
        for helper in helpers:
            helper.end()
    return [done[number].value() for number in range(len(items))]


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a fork of this process is sound: Linux, no thread beside this one, and torch not loaded."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules


@dataclass(frozen=True)
class _Outcome(Generic[Result]):
    """What the work of an item returned, or raised."""

    result: Result | None
    error: Exception | None

    def value(self) -> Result:
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # None is a result like any other


@dataclass(frozen=True)
class _Helper:
    """A forked process, and the pipe that its results come through."""

    process: int
    pipe: int

    def results(self) -> dict[int, _Outcome[Result]]:
        """All that it has done, once there is nothing left to take."""
        import pickle

        with os.fdopen(self.pipe, "rb", closefd=False) as stream:
            sent = stream.read()
        if not sent:
            raise ChildProcessError("a process that did part of the work was ended")
        found: dict[int, _Outcome[Result]] = pickle.loads(sent)
        return found

    def end(self) -> None:
        """Wait for it; it has sent its results, or nobody wants them any more."""
        os.close(self.pipe)
        os.kill(self.process, signal.SIGTERM)
        os.waitpid(self.process, 0)


def _queue(size: int) -> int:
    """A pipe that holds the numbers of all items; each is read once, by whoever reads first."""
    queue, filled = os.pipe()
    os.write(filled, b"".join(number.to_bytes(NUMBER_BYTES, "big") for number in range(size)))
    os.close(filled)
    return queue


def _take(
    work: Callable[[Item], Result], items: Sequence[Item], queue: int, done: dict[int, _Outcome[Result]]
) -> None:
    """Do what is in the queue until it is empty."""
    while taken := os.read(queue, NUMBER_BYTES):
        number = int.from_bytes(taken, "big")
        try:
            done[number] = _Outcome(work(items[number]), None)
        except Exception as error:
            done[number] = _Outcome(None, error)


def _helper(work: Callable[[Item], Result], items: Sequence[Item], queue: int) -> _Helper:
    pipe, results = os.pipe()
    process = os.fork()
    if process:
        os.close(results)
        return _Helper(process, pipe)
    try:
        import pickle

        # An interrupt reaches the whole process group: the first process alone answers it.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(pipe)
        done: dict[int, _Outcome[Result]] = {}
        _take(work, items, queue, done)
        with os.fdopen(results, "wb") as stream:
            pickle.dump(done, stream, pickle.HIGHEST_PROTOCOL)
    finally:
        # Neither buffered output nor what is registered for the end of the program happens twice.
        os._exit(0)
