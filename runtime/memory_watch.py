"""Measured memory beside the planned, and which item of the budget was wrong when it is exceeded."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shipway.runtime.shards import local_tensor
from shipway.runtime.trainer import Trainer
from shipway.schemas.plan import MemoryBudget

TOLERANCE = 1.05
GIB = 2**30


@dataclass(frozen=True)
class Measured:
    """What can be told apart on a rank, in bytes."""

    parameters: int
    optimizer: int
    rest: int
    """Gradients, activations, communication and scratch at the peak."""


def measure(trainer: Trainer, allocated_bytes: int) -> Measured:
    """Split the measured peak of this rank into what holds it; a moving average counts as optimizer state."""
    parameters = _bytes(trainer.model.named_parameters().values())
    in_host_memory = trainer.model.mesh.layout.offloads_optimizer
    states = 0 if in_host_memory else _bytes(trainer.optimizer.state_tensors().values())
    states += _bytes(trainer.average.values.values()) if trainer.average else 0
    return Measured(parameters, states, max(0, allocated_bytes - parameters - states))


def breach(measured: Measured, budget: MemoryBudget) -> str | None:
    """A warning that names the item furthest above its plan, when the peak exceeds the budget."""
    total = measured.parameters + measured.optimizer + measured.rest
    if total <= budget.allocated_bytes * TOLERANCE:
        return None
    planned = {"parameters": 0, "optimizer": 0, "rest": 0}
    for item in budget.items:
        if item.category != "outside":
            planned[item.category if item.category in ("parameters", "optimizer") else "rest"] += item.bytes
    excess = {name: getattr(measured, name) - planned[name] for name in planned}
    worst = max(excess, key=lambda name: excess[name])
    words = "activations, gradients, communication and scratch" if worst == "rest" else worst
    return (
        f"memory: {total / GIB:.2f} GiB allocated at the peak, {budget.allocated_bytes / GIB:.2f} planned;"
        f" the term that was wrong: {words}, {getattr(measured, worst) / GIB:.2f} GiB"
        f" against {planned[worst] / GIB:.2f}"
    )


def peak_bytes(device: torch.device) -> tuple[int, int] | None:
    """Peak allocated and reserved bytes of this process, None where the device does not count."""
    if device.type != "cuda":
        return None
    return torch.cuda.max_memory_allocated(device), torch.cuda.max_memory_reserved(device)


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(local_tensor(t).numel() * t.element_size() for t in tensors)
