"""Telling a hang, and naming who is late."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import socket
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shipway.runtime import watchdog as watchdog_module
from shipway.runtime.data.batch import Batch
from shipway.runtime.data.loader import Loader
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from shipway.runtime.watchdog import Limits, Watchdog, Whereabouts, furthest_behind
from shipway.schemas.layout import Layout
from tests.runtime.ranks import run_ranks
from tests.runtime.small_plan import small_plan, write_build


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


def _train_until_one_rank_hangs(build: Path, run: Path) -> None:
    """Rank 1 never gets its third step's data."""
    watchdog_module.GRACE_SECONDS = 0.0
    next_step, steps = Loader.next_step, itertools.count(1)

    def stuck(loader: Loader) -> list[Batch]:
        if dist.get_rank() == 1 and next(steps) == 3:
            time.sleep(600)
        return next_step(loader)

    Loader.next_step = stuck  # type: ignore[method-assign]
    train_here(build, RunFolder(run), torch.device("cpu"), StopRequest(), display=Silent())


def test_all_ranks_name_the_one_that_hangs_and_end_as_retryable(tmp_path: Path) -> None:
    layout = Layout(data_parallel_shard=2, micro_batch=2)
    plan = small_plan({"short": 20}, [layout], 4, layers=3, faults={"hang_minimum": "8s", "hang_factor": 1.0})
    with pytest.raises(AssertionError, match="left no result"):
        run_ranks(_train_until_one_rank_hangs, 2, write_build(plan, tmp_path / "build"), tmp_path / "run")
    attempt = tmp_path / "run" / "attempts" / "0"
    for rank in range(2):
        ended = json.loads((attempt / f"rank{rank}.json").read_text())
        assert ended["code"] == ExitCode.RETRYABLE
        assert f"rank {rank} on {socket.gethostname()} has been in step 3 " in ended["reason"]
        late = ended["reason"].partition("furthest behind: ")[2]
        assert late.startswith(f"rank 1 on {socket.gethostname()} (step ")
        assert "rank 0" not in late
    assert "in stuck" in (attempt / "rank1.stacks").read_text()
