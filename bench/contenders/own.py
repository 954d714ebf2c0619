"""Shipway's own contender: plan, build, and train the build as `shipway verify` does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.contenders.cases import BLUEPRINTS, Contender, overrides
from shipway.compiler.compose import compose
from shipway.compiler.emit.build import build
from shipway.compiler.pipeline import make_plan
from shipway.compiler.validate import validate
from shipway.schemas.plan import Plan, StagePlan

SLOWEST = 12
"""Kernels that a row names."""


class RefusedError(Exception):
    """A contender that cannot run here; the message says why."""


@dataclass(frozen=True)
class Case:
    """A contender's blueprint, planned and built."""

    plan: Plan
    folder: Path

    @property
    def stage(self) -> StagePlan:
        """The only stage."""
        return self.plan.stages[0]

    @property
    def tokens_per_step(self) -> int:
        """Over all micro-batches."""
        return self.stage.sequences_per_step * self.stage.context_tokens

    def rates(self, step_seconds: float) -> dict[str, float]:
        """Tokens per second and model FLOPs utilisation, by the plan's model FLOPs, of a measured step."""
        return {
            "step_seconds": step_seconds,
            "tokens_per_second": self.tokens_per_step / step_seconds,
            "mfu": self.stage.mfu * self.stage.step_seconds / step_seconds,
        }


def prepare(contender: Contender, tiny: bool, asked: tuple[str, ...], folder: Path) -> Case:
    """Plan and build the contender's blueprint; raises RefusedError where the planner does."""
    given = overrides(contender, tiny, asked)
    blueprint, diagnostics = validate(compose(str(BLUEPRINTS / f"{contender.case}.yaml"), given, None))
    if blueprint is None:
        raise RefusedError("; ".join(d.summary for d in diagnostics))
    plan = make_plan(blueprint)
    if isinstance(plan, list):
        raise RefusedError("; ".join(d.summary for d in plan))
    built = build(plan, folder)
    if isinstance(built, list):
        raise RefusedError("; ".join(d.summary for d in built))
    return Case(plan, folder)


def described(case: Case) -> dict[str, Any]:
    """What every row of a case says, whoever trains it."""
    layout = case.stage.layout
    return {
        "tokens_per_step": case.tokens_per_step,
        "context_tokens": case.stage.context_tokens,
        "micro_batch": layout.micro_batch,
        "micro_batches": layout.micro_batches,
        "model_flops_per_token": case.stage.model_flops_per_token,
        "shipway_parameters": case.plan.parameters.total,
        "active_parameters": case.plan.parameters.active,
    }


def train(case: Case, device_kind: str, steps: int) -> dict[str, Any]:
    """Train the build for a few steps and measure it; beside it, what was planned."""
    import torch

    from shipway.runtime.distributed import join, leave
    from shipway.runtime.mesh import MeshPool
    from shipway.runtime.verification.stage import measure_stage

    torch.set_num_threads(1)
    device = join(device_kind)
    reading = measure_stage(case.folder, None, device, MeshPool(device), steps, documents=False)
    leave()
    stage, training, (rank,) = case.stage, case.plan.blueprint.training, reading.ranks
    return {
        **case.rates(reading.step_seconds),
        "steps": reading.steps,
        "allocated_bytes": rank.allocated_bytes,
        "reserved_bytes": rank.reserved_bytes,
        "parameters": case.plan.parameters.total,
        "settings": {
            "compute": training.precision.compute,
            "master": training.precision.master,
            "gradients": training.precision.gradients,
            "moments": training.precision.optimizer,
            "optimizer": training.optimizer.kind,
            "compile": training.compile,
            "recompute": stage.layout.recompute,
            "zero": stage.layout.zero,
        },
        "planned": {
            "step_seconds": stage.step_seconds,
            "allocated_bytes": stage.memory.ranks[0].allocated_bytes,
            "calibration": case.plan.calibration,
        },
        "phase_seconds": reading.phase_seconds,
        "kernel_seconds": reading.kernel_seconds,
        "kernels": reading.kernels,
        "slowest_kernels": dict(list(reading.slowest_kernels.items())[:SLOWEST]),
    }
