"""Reading ahead: bounded, in order, with errors passed on and no thread left behind."""

from __future__ import annotations

import itertools
import threading

import pytest

from shipway.runtime.data.errors import DataError
from shipway.runtime.data.prefetch import Prefetcher
from tests.runtime.data.streams import loader, numbered_texts

WAIT_SECONDS = 10.0


def test_items_come_in_order_and_no_more_than_asked_for() -> None:
    counter = itertools.count()
    ahead = Prefetcher(lambda: next(counter), count=5, depth=2)
    assert [ahead.get() for _ in range(5)] == [0, 1, 2, 3, 4]
    ahead.close()
    assert next(counter) == 5


def test_reading_ahead_stops_at_the_depth() -> None:
    started = [threading.Event() for _ in range(10)]
    counter = itertools.count()

    def produce() -> int:
        number = next(counter)
        started[number].set()
        return number

    ahead = Prefetcher(produce, count=10, depth=2)
    assert started[2].wait(WAIT_SECONDS)  # two in the queue, the third in hand
    assert not started[3].is_set()
    ahead.get()
    assert started[3].wait(WAIT_SECONDS)
    ahead.close()


def test_an_error_reaches_the_reader_after_the_items_before_it() -> None:
    items = iter([1, 2])

    def produce() -> int:
        try:
            return next(items)
        except StopIteration:
            raise DataError("no more") from None

    ahead = Prefetcher(produce, count=9, depth=4)
    assert [ahead.get(), ahead.get()] == [1, 2]
    with pytest.raises(DataError, match="no more"):
        ahead.get()


def test_closing_leaves_no_thread_even_when_the_queue_is_full() -> None:
    before = threading.active_count()
    reading = loader({"a": numbered_texts(50)}, prefetch_steps=1)
    reading.next_step()
    assert threading.active_count() == before + 1
    reading.close()
    assert threading.active_count() == before


def test_a_corrupt_source_stops_a_reading_ahead_loader_with_its_reason() -> None:
    texts = [*numbered_texts(10), None]
    with loader({"a": texts}, prefetch_steps=2, rows_per_step=64) as reading:
        with pytest.raises(DataError, match="texts:10: made unreadable"):
            for _ in reading:
                pass
        assert reading.data_wait_seconds > 0
