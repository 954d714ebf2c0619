"""The soak, short: a run that is killed, stopped and resharded is the unbroken one.

The same driver as `make soak`, over ranks that are forked with torch already imported.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import pytest

from bench.breaking import KINDS, Moment, Soak, draw, steps_of
from bench.soak import OTHER, SAME, compare, problems
from bench.starts import Forked
from shipway.runtime.exit_codes import ExitCode
from shipway.schemas.layout import Layout
from tests.runtime.small_plan import small_plan, write_build

STAGES = {"short": 8, "long": 10}
INTERVAL = 3
LAYOUTS = {
    "fsdp 2": [Layout(data_parallel_shard=2, micro_batch=2)] * 2,
    "alone": [Layout(micro_batch=2, micro_batches=2)] * 2,
}


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
        name: write_build(small_plan(STAGES, layouts, 4, layers=3, **options), folder / f"build {name}")
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
    ]
    broken = soak("same", moments)
    found = compare(broken.run, unbroken.run, broken.outcomes)
    assert problems({SAME: found}, INTERVAL) == []
    assert found.identical
    assert len(steps_of(broken.run)) == sum(STAGES.values())
    assert broken.outcomes[0].torn, "it was killed before its checkpoint was finished"
    assert broken.outcomes[1].exit_code == ExitCode.RETRYABLE
    assert all(outcome.lost_steps > 0 for outcome in broken.outcomes)


def test_stopped_it_loses_nothing_and_goes_on_with_other_processes(
    soak: Callable[[str, list[Moment]], Soak], unbroken: Soak
) -> None:
    broken = soak("other", [at(number=1, kind="sigterm", step=1, layout="alone")])
    found = compare(broken.run, unbroken.run, broken.outcomes)
    assert problems({OTHER: found}, INTERVAL) == []
    (stopped,) = broken.outcomes
    assert stopped.exit_code == ExitCode.PREEMPTED
    assert stopped.lost_steps == 0
    assert 1 <= stopped.finished_step < sum(STAGES.values())


def test_moments_are_spread_over_the_run_and_every_kind_comes() -> None:
    drawn = draw(15, 3, 120, ["a", "b", "c"])
    assert [m.step for m in drawn] == sorted(m.step for m in drawn)
    assert {m.kind for m in drawn} == set(KINDS)
    assert all(1 <= m.step < 120 for m in drawn)
    assert all(a.layout != b.layout for a, b in pairwise(drawn))
    assert drawn == draw(15, 3, 120, ["a", "b", "c"])
