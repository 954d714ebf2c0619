"""Telling a hang, and naming who is late."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from shipway.runtime.exit_codes import ExitCode
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


def _hang(folder: Path) -> None:
    dog = Watchdog(
        0, 1, Limits(1.0, 0.2), Notes(), folder / "stacks", on_hang=(folder / "verdict").write_text
    )
    dog.step_begins(1)
    dog.step_ends()
    dog.start()
    dog.step_begins(2)
    stuck_in_this_function()


def stuck_in_this_function() -> None:
    time.sleep(60)


def test_hung_process_dumps_its_stacks_and_ends_as_retryable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shipway.runtime.watchdog.GRACE_SECONDS", 0.0)
    process = multiprocessing.get_context("fork").Process(target=_hang, args=(tmp_path,))
    process.start()
    process.join(30)
    assert process.exitcode == ExitCode.RETRYABLE
    assert "has been in step 2" in (tmp_path / "verdict").read_text()
    assert "stuck_in_this_function" in (tmp_path / "stacks").read_text()


def test_step_within_its_time_is_no_hang() -> None:
    dog = watchdog(Notes())
    dog.step_begins(1)
    assert dog.verdict() is None
