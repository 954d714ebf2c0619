"""The soak, short: a run that is killed, stopped and resharded is the unbroken one.

The same driver as `make soak`, over ranks that are forked with torch already imported.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bench.breaking import KINDS, Moment, Soak, draw, send, steps_of
from bench.soak import Finding, compare, problems
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.failures import classify
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from shipway.schemas.layout import Layout
from tests.runtime.ranks import PRELOADED
from tests.runtime.small_plan import small_plan, write_build

STAGES = {"short": 14, "long": 10}
INTERVAL = 3
LAYOUTS = {
    "fsdp 2": [Layout(data_parallel_shard=2, micro_batch=2)] * 2,
    "alone": [Layout(micro_batch=2, micro_batches=2)] * 2,
}


class Forked:
    """A start of ranks forked from a server that has torch imported."""

    def __init__(self, build: Path, run: Path, processes: int, attempt: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = f"{mkdtemp()}/store"
        self._ranks = [
            context.Process(target=_rank, args=(rank, processes, store, build, run, attempt), daemon=True)
            for rank in range(processes)
        ]
        for rank in self._ranks:
            rank.start()

    def pids(self) -> list[int]:
        return [rank.pid for rank in self._ranks if rank.is_alive() and rank.pid is not None]

    def ask_to_stop(self, number: signal.Signals) -> None:
        send(self.pids(), number)

    def wait(self) -> int:
        for rank in self._ranks:
            rank.join(120)
        codes = {rank.exitcode for rank in self._ranks}
        if ExitCode.FATAL in codes or None in codes:
            return int(ExitCode.FATAL)
        return codes.pop() or 0 if len(codes) == 1 and min(codes) >= 0 else int(ExitCode.RETRYABLE)  # type: ignore[type-var]


def _rank(rank: int, processes: int, store: str, build: Path, run: Path, attempt: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "SHIPWAY_ATTEMPT": str(attempt)}
    stop = StopRequest()
    stop.install()
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    try:
        code = train_here(build, RunFolder(run), torch.device("cpu"), stop, display=Silent())
    except BaseException as error:
        code, reason = classify(error)
        RunFolder(run).write_exit(rank, code, reason)
    os._exit(code)


@pytest.fixture(scope="module")
def soak(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, list[Moment]], Soak]:
    """Runs to their end, broken at given moments."""
    folder = tmp_path_factory.mktemp("soak")
    options: dict[str, Any] = {
        "checkpoints": {"every_steps": INTERVAL, "keep_last": 2},
        "evaluation": {"every_steps": 100, "sequences": 2},
        "ema": {"decay": 0.9},
        "data": {"interleave": 16},
    }
    builds = {
        name: write_build(small_plan(STAGES, layouts, sequences=4, **options), folder / f"build {name}")
        for name, layouts in LAYOUTS.items()
    }

    def go(name: str, moments: list[Moment]) -> Soak:
        processes = {name: layouts[0].world_size for name, layouts in LAYOUTS.items()}
        made = Soak(folder / name, builds, processes, moments, Forked)
        made.run.mkdir()
        while made.next():
            pass
        return made

    return go


@pytest.fixture(scope="module")
def unbroken(soak: Callable[[str, list[Moment]], Soak]) -> Soak:
    return soak("unbroken", [])


at = partial(Moment, delay=0.3, rank=1, layout="fsdp 2")


def test_killed_and_out_of_disk_it_loses_no_more_than_the_interval_and_goes_on_bit_for_bit(
    soak: Callable[[str, list[Moment]], Soak], unbroken: Soak
) -> None:
    moments = [
        at(number=1, kind="kill all while saving", step=4),
        at(number=2, kind="full disk", step=8),
        at(number=3, kind="kill one rank", step=17),
    ]
    broken = soak("same", moments)
    found = compare(broken.run, unbroken.run, broken.outcomes)
    assert problems(found, found, INTERVAL) == []
    assert found.identical
    assert len(steps_of(broken.run)) == sum(STAGES.values())
    assert broken.outcomes[0].torn, "it was killed before its checkpoint was finished"
    assert broken.outcomes[1].exit_code == ExitCode.RETRYABLE
    assert broken.outcomes[2].exit_code == ExitCode.RETRYABLE
    assert all(outcome.lost_steps > 0 for outcome in broken.outcomes[:2])


def test_stopped_it_loses_nothing_and_goes_on_with_other_processes(
    soak: Callable[[str, list[Moment]], Soak], unbroken: Soak
) -> None:
    moments = [
        at(number=1, kind="sigterm to one rank", step=5),
        at(number=2, kind="sigusr1", step=16, layout="alone"),
    ]
    broken = soak("other", moments)
    found = compare(broken.run, unbroken.run, broken.outcomes)
    assert problems(Finding(**{**found.__dict__, "identical": True}), found, INTERVAL) == []
    assert [outcome.exit_code for outcome in broken.outcomes] == [ExitCode.PREEMPTED] * 2
    assert [outcome.lost_steps for outcome in broken.outcomes] == [0, 0]


def test_moments_are_spread_over_the_run_and_every_kind_comes() -> None:
    drawn = draw(15, 3, 120, ["a", "b", "c"])
    assert [m.step for m in drawn] == sorted(m.step for m in drawn)
    assert {m.kind for m in drawn} == set(KINDS)
    assert all(1 <= m.step < 120 for m in drawn)
    assert all(a.layout != b.layout for a, b in pairwise(drawn))
    assert drawn == draw(15, 3, 120, ["a", "b", "c"])
