"""Telling a hang, and naming who is late."""

from __future__ import annotations

import json
import time
from pathlib import Path

from shipway.runtime.watchdog import Limits, Watchdog, Whereabouts, furthest_behind


class Notes(dict[str, bytes]):
    """A key-value store."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self for key in keys)


def watchdog(notes: Notes, minimum_seconds: float = 100.0) -> Watchdog:
    return Watchdog(1, 3, Limits(4.0, minimum_seconds), notes, Path("unused"), on_hang=lambda text: None)


def test_limit_follows_the_median_and_never_falls_below_the_minimum() -> None:
    limits = Limits(factor=4.0, minimum_seconds=10.0)
    assert limits.seconds([1.0, 1.0, 50.0]) == 10.0
    assert limits.seconds([5.0, 6.0, 7.0]) == 24.0
    assert limits.seconds([]) == 100.0


def test_rank_that_others_wait_for_is_named() -> None:
    notes = [
        Whereabouts(0, "a", 7, "gradients"),
        Whereabouts(1, "b", 7, "data"),
        Whereabouts(2, "c", 8, "data"),
    ]
    assert [note.rank for note in furthest_behind(notes)] == [1]


def test_verdict_says_rank_host_step_and_the_late_one() -> None:
    notes = Notes()
    notes.set("whereabouts/0", json.dumps({"host": "a", "step": 5, "phase": "gradients"}))
    notes.set("whereabouts/2", json.dumps({"host": "late-host", "step": 5, "phase": "data"}))
    dog = watchdog(notes, minimum_seconds=0.001)
    dog.step_begins(4)
    dog.step_ends()
    dog.step_begins(5)
    dog.phase("update")
    time.sleep(0.05)
    text = dog.verdict()
    assert text is not None
    assert text.startswith("rank 1 on ")
    assert "step 5 (update)" in text
    assert text.endswith("furthest behind: rank 2 on late-host (step 5, data)")


def test_step_within_its_time_is_no_hang() -> None:
    dog = watchdog(Notes())
    dog.step_begins(1)
    assert dog.verdict() is None
