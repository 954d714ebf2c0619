"""What ranks do in tests of one layout against another: one step's loss, gradients and expert loads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from shipway.runtime.mesh import MeshPool, build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.trainer import Trainer
from shipway.schemas.layout import Layout
from shipway.schemas.training import Muon
from tests.runtime.training_cases import FP32, micro_batches
from tests.templates.generated import load, variant


@dataclass(frozen=True)
class Gradients:
    """What one step gives, and the loss of the step after it."""

    loss: float
    norm: float
    gradients: dict[str, torch.Tensor]
    loads: dict[str, list[int]]
    next_loss: float


def gradients(layout: Layout, changes: dict[str, Any], model: str, pool: MeshPool) -> Gradients:
    """Two optimizer steps of a variant under a layout; this rank's parameters' whole gradients."""
    module, device = load(variant(model, **changes)), torch.device("cpu")
    mesh = build_mesh(layout, device, pool)
    parallel = build_parallel_model(module, mesh, FP32, 3)
    optimizer = build_optimizer(
        parallel.named_parameters(), module.OPTIMIZER_GROUPS, Muon(), FP32, device, mesh
    )
    trainer = Trainer(parallel, optimizer, 1.0)
    found: dict[str, torch.Tensor] = {}
    update = optimizer.step

    def step(rate: float) -> None:
        for name, parameter in parallel.named_parameters().items():
            if name not in found:
                gradient: Any = parameter.grad
                whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
                found[name] = whole.detach().clone()
        update(rate)

    optimizer.step = step  # type: ignore[method-assign]
    trainer.gradient_clip = None
    first = trainer.step(micro_batches(0, mesh), 0.01)
    second = trainer.step(micro_batches(1, mesh), 0.01)
    loads = {name: load.tolist() for name, load in first.expert_loads.items()}
    return Gradients(first.loss, first.gradient_norm, found, loads, second.loss)


def all_gradients(cases: list[tuple[Layout, dict[str, Any], str]]) -> list[Gradients]:
    """Of each case in turn; equal cases are trained once."""
    pool = MeshPool(torch.device("cpu"))
    found: dict[str, Gradients] = {}
    for case in cases:
        if repr(case) not in found:
            found[repr(case)] = gradients(*case, pool)
    return [found[repr(case)] for case in cases]


def assert_same(found: Gradients, expected: Gradients, relative: float = 1e-5) -> None:
    """Loss, norm, loads and every parameter's gradient, each relative to its own norm."""
    assert abs(found.loss / expected.loss - 1) < relative
    assert abs(found.norm / expected.norm - 1) < relative
    assert found.loads.items() <= expected.loads.items()
    for name, gradient in found.gradients.items():
        scale = expected.gradients[name].norm().clamp(min=1e-5 * expected.norm)
        difference = float((gradient - expected.gradients[name]).norm() / scale)
        assert difference < 10 * relative, f"{name}: {difference}"
    assert abs(found.next_loss / expected.next_loss - 1) < 10 * relative
