"""Figures of a step beside the plan's: speed, utilisation, memory of the worst rank."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shipway.runtime.memory_watch import breach, measure, peak_bytes
from shipway.runtime.metrics import StepMetrics
from shipway.runtime.routing import imbalance
from shipway.runtime.stage import StageRun
from shipway.runtime.trainer import StepResult

STEADY_STEPS = 3
"""Memory is judged after the optimizer's first steps: states are allocated then, and caches are warm."""


def step_metrics(
    run: StageRun,
    result: StepResult,
    rate: float,
    seconds: float,
    data_wait_seconds: float,
    peak: tuple[int, int] | None,
) -> StepMetrics:
    """All figures of the step that has just ended; `peak` is allocated and reserved bytes."""
    stage, blueprint, at = run.stage, run.context.plan.blueprint, run.position
    tokens_per_second = stage.sequences_per_step * stage.context_tokens / seconds
    rates = blueprint.cluster.device.peak
    peak_flops = rates.bf16 if blueprint.training.precision.activations == "bf16" else rates.fp32
    planned = stage.memory.of(run.mesh.rank("pp"))
    return StepMetrics(
        stage=stage.name,
        step=at.step,
        stage_step=at.stage_step,
        stage_steps=stage.steps,
        loss=result.loss,
        learning_rate=rate,
        gradient_norm=result.gradient_norm,
        finite=result.finite,
        tokens=at.tokens,
        step_seconds=seconds,
        planned_step_seconds=stage.step_seconds,
        tokens_per_second=tokens_per_second,
        planned_tokens_per_second=stage.tokens_per_second,
        mfu=tokens_per_second * stage.model_flops_per_token / (peak_flops * run.layout.world_size),
        planned_mfu=stage.mfu,
        data_wait_seconds=data_wait_seconds,
        memory_allocated_bytes=peak[0] if peak else None,
        memory_reserved_bytes=peak[1] if peak else None,
        planned_memory_allocated_bytes=planned.allocated_bytes,
        planned_memory_reserved_bytes=planned.reserved_bytes,
        stream_hash=run.loader.stream_hash,
        expert_load={name: imbalance(load) for name, load in result.expert_loads.items()},
    )


class MemoryWatch:
    """Peak memory of this stage: the worst rank's figures, and one warning when the plan is exceeded."""

    def __init__(self, run: StageRun) -> None:
        self._run = run
        self._warned = False
        self._steps = 0
        if run.context.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(run.context.device)

    def peak(self) -> tuple[int, int] | None:
        """Allocated and reserved bytes of the worst rank so far; every rank must call it."""
        self._steps += 1
        mine = peak_bytes(self._run.context.device)
        if mine is None:
            return None
        worst = torch.tensor(mine)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX, group=self._run.context.groups.control)
        return int(worst[0]), int(worst[1])

    def warning(self) -> str | None:
        """This rank's breach of the plan, once, in steady state."""
        mine = peak_bytes(self._run.context.device)
        if mine is None or self._warned or self._steps < STEADY_STEPS:
            return None
        budget = self._run.stage.memory.of(self._run.mesh.rank("pp"))
        text = breach(measure(self._run.trainer, mine[0]), budget)
        self._warned = text is not None
        return text
