"""Learning rates over a stage."""

from __future__ import annotations

import pytest

from shipway.runtime.schedules import learning_rate
from shipway.schemas.training import ConstantSchedule, CosineSchedule, WsdSchedule


def rates(schedule: ConstantSchedule | CosineSchedule | WsdSchedule, steps: int) -> list[float]:
    return [learning_rate(schedule, step, steps) for step in range(steps)]


def test_warmup_rises_to_the_peak_and_starts_above_zero() -> None:
    assert rates(ConstantSchedule(peak=1.0, warmup=0.4), 10)[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_goes_from_peak_to_final() -> None:
    found = rates(CosineSchedule(peak=1.0, final=0.2, warmup=0.1), 22)
    assert found[2] == 1.0
    assert found[3] == pytest.approx(1.0)
    assert found[12] == pytest.approx(0.6)
    assert found[-1] == pytest.approx(0.2)
    assert found[3:] == sorted(found[3:], reverse=True)


def test_wsd_is_flat_then_decays_linearly() -> None:
    found = rates(WsdSchedule(peak=1.0, final=0.5, warmup=0.1, decay=0.5), 10)
    assert found[:6] == [1.0] * 6
    assert found[6:] == pytest.approx([0.875, 0.75, 0.625, 0.5])


@pytest.mark.parametrize("steps", [1, 2])
def test_stages_of_one_or_two_steps_have_a_rate(steps: int) -> None:
    for schedule in (CosineSchedule(peak=1.0), WsdSchedule(peak=1.0), ConstantSchedule(peak=1.0)):
        assert all(0 < rate <= 1.0 for rate in rates(schedule, steps)[:1])
