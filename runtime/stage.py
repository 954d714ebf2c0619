"""One training stage: its layout, its model restored from the last checkpoint, its loop of steps."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from shipway.runtime.checkpoint import Checkpointer, State, rng_state, set_rng_state
from shipway.runtime.checkpoint_folder import Manifest
from shipway.runtime.data.loader import Loader, make_loader
from shipway.runtime.distributed import HostGroups
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.mesh import Mesh, build_mesh, fit_layout
from shipway.runtime.metrics import MetricsWriter, StepMetrics
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.progress import Display
from shipway.runtime.routing import imbalance
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.schedules import learning_rate
from shipway.runtime.signals import StopRequest
from shipway.runtime.trainer import StepResult, Trainer
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Plan, StagePlan


@dataclass(frozen=True)
class Position:
    """Where the programme stands, between two optimizer steps."""

    stage: str = ""
    stage_step: int = 0
    step: int = 0
    """Optimizer steps since the programme began."""
    tokens: int = 0
    """Tokens read since the programme began."""


@dataclass(frozen=True)
class Context:
    """What all stages share."""

    plan: Plan
    module: ModuleType
    """The generated model."""
    build: Path
    run: RunFolder
    device: torch.device
    groups: HostGroups
    checkpointer: Checkpointer
    stop: StopRequest
    display: Display
    metrics: MetricsWriter | None
    """On rank 0 only."""


@dataclass
class StageRun:
    """A stage in progress."""

    context: Context
    stage: StagePlan
    layout: Layout
    mesh: Mesh
    trainer: Trainer
    loader: Loader
    position: Position

    def restore(self, folder: Path, manifest: Manifest, with_data: bool = True) -> None:
        """Take model, optimizer, random state and, unless rolling back, data position from a checkpoint."""
        checkpointer, rng = self.context.checkpointer, rng_state(self.context.device)
        state = self._state()
        if {f"rng.{name}" for name in rng} <= checkpointer.saved_names(folder):
            state["rng"] = rng
        checkpointer.restore(folder, state)
        if "rng" in state:
            set_rng_state(rng, self.context.device)
        self.trainer.optimizer.step_count = manifest.progress["optimizer_steps"]
        if with_data:
            self.loader.load_state_dict(manifest.progress["data"])

    def save(self) -> None:
        """Checkpoint the state after the last step."""
        state = self._state() | {"rng": rng_state(self.context.device)}
        progress = {
            "position": asdict(self.position),
            "optimizer_steps": self.trainer.optimizer.step_count,
            "data": self.loader.state_dict(),
        }
        self.context.checkpointer.save(self.position.step, state, progress, self.layout)

    def _state(self) -> State:
        return {
            "model": self.trainer.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_tensors(),
        }


def train_stage(context: Context, stage: StagePlan, start: tuple[Path, Manifest] | None) -> ExitCode:
    """Run a stage to its end or to an agreed stop; it ends in a checkpoint either way."""
    run = _open_stage(context, stage, start)
    try:
        return _loop(run)
    finally:
        run.loader.close()
        run.mesh.close()


def _open_stage(context: Context, stage: StagePlan, start: tuple[Path, Manifest] | None) -> StageRun:
    training = context.plan.blueprint.training
    layout = fit_layout(stage.layout, dist.get_world_size(), stage.sequences_per_step)
    mesh = build_mesh(layout, context.device)
    model = build_parallel_model(context.module, mesh, training.precision, training.seed)
    optimizer = build_optimizer(
        model.named_parameters(),
        context.module.OPTIMIZER_GROUPS,
        training.optimizer,
        training.precision,
        context.device,
    )
    loader = make_loader(
        stage,
        training.data,
        mesh.data_parallel_rank,
        mesh.data_parallel_size,
        training.seed,
        context.build,
        mix=_mix(context.plan, stage),
    )
    trainer = Trainer(model, optimizer, training.gradient_clip)
    run = StageRun(context, stage, layout, mesh, trainer, loader, Position(stage.name))
    if start:
        folder, manifest = start
        run.restore(folder, manifest)
        before = Position(**manifest.progress["position"])
        stage_step = before.stage_step if before.stage == stage.name else 0
        run.position = Position(stage.name, stage_step, before.step, before.tokens)
        context.display.message(f"{stage.name}: continuing from {folder.name}")
    return run


def _mix(plan: Plan, stage: StagePlan) -> Mapping[str, float] | None:
    return next(s.mix for s in plan.blueprint.training.stages if s.name == stage.name)


def _loop(run: StageRun) -> ExitCode:
    context, stage = run.context, run.stage
    checkpoints = context.plan.blueprint.training.checkpoints
    schedule = next(s.learning_rate for s in context.plan.blueprint.training.stages if s.name == stage.name)
    saved_at = run.position.step
    while run.position.stage_step < stage.steps:
        rate = learning_rate(schedule, run.position.stage_step, stage.steps)
        _one_step(run, rate)
        stopping = context.stop.agreed(context.groups.control)
        ended = run.position.stage_step == stage.steps
        if stopping or ended or run.position.step % checkpoints.every_steps == 0:
            run.save()
            saved_at = run.position.step
        if stopping and not ended:
            context.checkpointer.wait()
            context.display.message(f"stopped by request after step {saved_at}, saved")
            return ExitCode.PREEMPTED
    return ExitCode.DONE


def _one_step(run: StageRun, rate: float) -> None:
    began = time.perf_counter()
    waited = run.loader.data_wait_seconds
    result = run.trainer.step(run.loader.next_step(), rate)
    if run.mesh.data_parallel_size > 1:
        run.loader.update_stream_hash(result.token_hash)
    seconds = time.perf_counter() - began
    tokens = run.stage.sequences_per_step * run.stage.context_tokens
    at = run.position
    run.position = Position(at.stage, at.stage_step + 1, at.step + 1, at.tokens + tokens)
    metrics = _measure(run, result, rate, seconds, run.loader.data_wait_seconds - waited)
    if run.context.metrics:
        run.context.metrics.write(metrics)
    run.context.display.step(metrics)


def _measure(
    run: StageRun, result: StepResult, rate: float, seconds: float, data_wait_seconds: float
) -> StepMetrics:
    stage, plan, at = run.stage, run.context.plan, run.position
    tokens_per_second = stage.sequences_per_step * stage.context_tokens / seconds
    peak = plan.blueprint.cluster.device.peak
    peak_flops = peak.bf16 if plan.blueprint.training.precision.compute == "bf16" else peak.fp32
    planned = max(stage.memory.ranks, key=lambda budget: budget.allocated_bytes)
    cuda = run.context.device.type == "cuda"
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
        memory_allocated_bytes=torch.cuda.max_memory_allocated() if cuda else None,
        memory_reserved_bytes=torch.cuda.max_memory_reserved() if cuda else None,
        planned_memory_allocated_bytes=planned.allocated_bytes,
        planned_memory_reserved_bytes=planned.reserved_bytes,
        stream_hash=run.loader.stream_hash,
        expert_load={name: imbalance(load) for name, load in result.expert_loads.items()},
    )
