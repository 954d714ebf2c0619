"""Work done ahead in a background thread, with errors passed on and a clean end."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Prefetcher(Generic[Item]):
    """Calls `produce` `count` times, at most `depth` ahead of need; it runs in one thread only."""

    def __init__(self, produce: Callable[[], Item], count: int, depth: int) -> None:
        self.wait_seconds = 0.0
        """Time that `get` has spent waiting."""
        self._produce = produce
        self._count = count
        self._items: queue.Queue[Item | BaseException] = queue.Queue(maxsize=depth)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shipway-data", daemon=True)
        self._thread.start()

    def get(self) -> Item:
        """The next item; raises what `produce` raised."""
        started = time.perf_counter()
        item = self._items.get()
        self.wait_seconds += time.perf_counter() - started
        if isinstance(item, BaseException):
            self.close()
            raise item
        return item

    def close(self) -> None:
        """Stop the thread and wait for it; items made ahead are dropped."""
        self._stopping.set()
        while self._thread.is_alive():
            self._drain()
            self._thread.join(timeout=0.01)

    def _run(self) -> None:
        for _ in range(self._count):
            if self._stopping.is_set():
                return
            try:
                item: Item | BaseException = self._produce()
            except BaseException as error:  # whatever it is, the caller must see it
                item = error
            self._items.put(item)
            if isinstance(item, BaseException):
                return

    def _drain(self) -> None:
        while True:
            try:
                self._items.get_nowait()
            except queue.Empty:
                return
