"""One training stage on this rank: its layout, model, optimizer and data, saved and restored together."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from shipway.runtime.average import SECTION, Average
from shipway.runtime.checkpoint import State, rng_state, set_rng_state
from shipway.runtime.checkpoint_folder import Manifest
from shipway.runtime.context import Context, Position
from shipway.runtime.data.loader import Loader, make_loader
from shipway.runtime.environment import describe_environment
from shipway.runtime.mesh import Mesh, MeshPool, build_mesh, fit_layout
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallel.support import check_layout, check_model
from shipway.runtime.parallelize import ParallelModel, build_parallel_model
from shipway.runtime.qk_clip import QkClip
from shipway.runtime.trainer import Trainer
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Plan, StagePlan
from shipway.schemas.training import Muon, PretrainStage


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
    short_loss: float | None = None
    """Held-out loss of short contexts at the end of the last stage, for the seesaw guard."""

    @property
    def blueprint(self) -> PretrainStage:
        """What the user asked of this stage."""
        return self.context.plan.blueprint.training.stage(self.stage.name)

    def restore(self, folder: Path, manifest: Manifest, with_data: bool = True) -> None:
        """Take model, optimizer, random state and, unless rolling back, the data position from a checkpoint.

        Random state is kept per rank: a checkpoint of fewer ranks has none for the others, which
        then keep the one that the seed gave them.
        """
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
            "short_loss": self.short_loss,
        }
        self.context.checkpointer.save(self.position.step, state, progress, self.layout)

    def close(self) -> None:
        """Free the data threads."""
        self.loader.close()

    def _state(self) -> State:
        average = self.trainer.average
        return {
            "model": self.trainer.model.state_dict(),
            "optimizer": self.trainer.optimizer.state_tensors(),
            **({SECTION: average.values} if average else {}),
        }


def open_stage(context: Context, stage: StagePlan, start: tuple[Path, Manifest] | None) -> StageRun:
    """Build everything for a stage, and continue from a checkpoint of it or of the stage before."""
    trainer = build_trainer(context.plan, context.module, stage, context.device, context.meshes)
    mesh = trainer.model.mesh
    _record_environment(context, trainer.model)
    loader = open_loader(context.plan, context.build, stage, mesh)
    run = StageRun(context, stage, mesh.layout, mesh, trainer, loader, Position(stage.name))
    if start:
        folder, manifest = start
        run.restore(folder, manifest)
        before = Position(**manifest.progress["position"])
        stage_step = before.stage_step if before.stage == stage.name else 0
        run.position = Position(stage.name, stage_step, before.step, before.tokens)
        run.short_loss = manifest.progress["short_loss"]
        context.display.message(f"{stage.name}: continuing from {folder.name}")
    return run


def build_trainer(
    plan: Plan, module: ModuleType, stage: StagePlan, device: torch.device, meshes: MeshPool
) -> Trainer:
    """Model and optimizer of a stage, spread by its layout as it fits the ranks that are there."""
    training = plan.blueprint.training
    layout = fit_layout(stage.layout, dist.get_world_size(), stage.sequences_per_step)
    check_layout(layout, training.precision)
    check_model(layout, plan.blueprint.model, stage.context_tokens)
    mesh = build_mesh(layout, device, meshes)
    model = build_parallel_model(
        module, mesh, training.precision, training.seed, training.compile, plan.fp8_linears
    )
    optimizer = build_optimizer(
        model.named_parameters(),
        module.OPTIMIZER_GROUPS,
        training.optimizer,
        training.precision,
        device,
        mesh,
    )
    average = Average(model.named_parameters(), training.ema.decay) if training.ema else None
    return Trainer(model, optimizer, training.gradient_clip, _qk_clip(plan, model), average)


def _record_environment(context: Context, model: ParallelModel) -> None:
    parameters = model.count()
    if context.metrics:
        training = context.plan.blueprint.training
        fp8 = training.precision.compute == "fp8"
        found = describe_environment(context.device, training.compile, fp8=fp8)
        context.run.write_environment(found | {"parameters": parameters})


def open_loader(plan: Plan, build: Path, stage: StagePlan, mesh: Mesh) -> Loader:
    """This rank's share of a stage's data."""
    training = plan.blueprint.training
    return make_loader(
        # The layout may have been fitted to other ranks; rows per micro-batch and step stay the plan's.
        stage,
        training.data,
        mesh.data_parallel_rank,
        mesh.data_parallel_size,
        training.seed,
        Path(plan.folder or build),
        mix=training.stage(stage.name).mix,
        model=plan.blueprint.model,
        pin_memory=mesh.device.type == "cuda",
    )


def _qk_clip(plan: Plan, model: ParallelModel) -> QkClip | None:
    optimizer, latent = plan.blueprint.training.optimizer, plan.blueprint.model.attention.latent
    if not isinstance(optimizer, Muon) or optimizer.qk_clip is None or latent is None:
        return None
    return QkClip(model, latent, optimizer.qk_clip)
