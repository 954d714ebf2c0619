"""Learning-rate schedules of one stage: cosine, warm-up-stable-decay, constant."""

from __future__ import annotations

import math

from shipway.schemas.training import ConstantSchedule, CosineSchedule, LearningRate, WsdSchedule


def learning_rate(schedule: LearningRate, step: int, steps: int) -> float:
    """Learning rate of optimizer step `step` (from 0) of a stage of `steps` steps.

    Warm-up reaches `peak` at its last step and never uses 0, so that no step is wasted.
    """
    warmup_steps = math.ceil(schedule.warmup * steps)
    if step < warmup_steps:
        return schedule.peak * (step + 1) / warmup_steps
    match schedule:
        case ConstantSchedule():
            return schedule.peak
        case CosineSchedule():
            progress = _progress(step, warmup_steps, steps)
            return schedule.final + (schedule.peak - schedule.final) * 0.5 * (
                1 + math.cos(math.pi * progress)
            )
        case WsdSchedule():
            decay_start = max(warmup_steps, steps - math.ceil(schedule.decay * steps))
            progress = _progress(step, decay_start, steps)
            return schedule.peak + (schedule.final - schedule.peak) * progress


def _progress(step: int, start: int, steps: int) -> float:
    """Share of the way from `start` to the last step: 0 at or before `start`, 1 at step `steps - 1`."""
    if step <= start:
        return 0.0
    return min(1.0, (step - start) / max(1, steps - 1 - start))
