"""The same work on several items, on all the cores that this process has."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def spread(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` of every item, in their order.

    Workers are forked, so that nothing is imported again. Where that is not safe (other threads may hold
    locks) or not worth it, all is done here. Raises what the work of an item raised.
    """
    count = min(cores(), len(items))
    if count < 2 or not may_fork():
        return [work(item) for item in items]
    from concurrent.futures import ProcessPoolExecutor
    from multiprocessing import get_context

    # An interrupt reaches the whole process group: this process alone answers it.
    quiet = (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(count, get_context("fork"), signal.signal, quiet) as pool:
        return list(pool.map(work, items))


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def may_fork() -> bool:
    """Whether a fork of this process is sound: Linux, no thread beside this one, and torch not loaded."""
    return sys.platform == "linux" and threading.active_count() == 1 and "torch" not in sys.modules
