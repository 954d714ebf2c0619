"""What ranks do in the tests of training: a few steps on given rows under a layout."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shipway.runtime.data.batch import Batch
from shipway.runtime.mesh import Mesh, MeshPool, build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.trainer import StepResult, Trainer
from shipway.schemas.layout import Layout
from shipway.schemas.training import AdamW, Compilation, Muon, Optimizer, Precision
from tests.templates.generated import load, variant

SEQUENCES = 8
CONTEXT_TOKENS = 32
FP32 = Precision(compute="fp32")
SHALLOW: dict[str, Any] = {"layers": 3, "attention.mix": ["latent", "delta", "latent"]}
"""Changes to a variant with both kinds: each kind of layer once between others, more would only take time."""


@dataclass(frozen=True)
class Outcome:
    """What a rank saw of its steps, and the whole parameters afterwards."""

    losses: list[float]
    gradient_norms: list[float]
    parameters: dict[str, torch.Tensor]


def rows(step: int) -> Batch:
    """The global batch of a step: uneven valid tokens, documents of uneven lengths."""
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, 61, (SEQUENCES, CONTEXT_TOKENS), generator=generator)
    labels = torch.randint(0, 61, (SEQUENCES, CONTEXT_TOKENS), generator=generator)
    for row in range(SEQUENCES):
        labels[row, : (5 * row) % 23] = -100
    ends = [row * CONTEXT_TOKENS + cut for row in range(SEQUENCES) for cut in (0, 7 + row)]
    return Batch(tokens, labels, torch.tensor([*ends, SEQUENCES * CONTEXT_TOKENS], dtype=torch.int32))


def micro_batches(step: int, mesh: Mesh) -> list[Batch]:
    """This rank's micro-batches of a step."""
    whole, layout = rows(step), mesh.layout
    share = SEQUENCES // mesh.data_parallel_size
    first = mesh.data_parallel_rank * share
    starts = range(first, first + share, layout.micro_batch)
    return [_rows_of(whole, start, start + layout.micro_batch) for start in starts]


def _rows_of(batch: Batch, start: int, end: int) -> Batch:
    bounds = batch.cu_seqlens
    low, high = start * CONTEXT_TOKENS, end * CONTEXT_TOKENS
    inside = bounds[(bounds >= low) & (bounds <= high)] - low
    return Batch(batch.tokens[start:end], batch.labels[start:end], inside.to(torch.int32))


def make_trainer(
    layout: Layout,
    optimizer: Optimizer | None = None,
    clip: float | None = 1.0,
    model: str = "hybrid",
    seed: int = 3,
    pool: MeshPool | None = None,
    compilation: Compilation = "none",
    precision: Precision = FP32,
    fp8_linears: Collection[str] = (),
    changes: Mapping[str, Any] = SHALLOW,
) -> Trainer:
    """A trainer of a small generated model, a variant with `changes`, under a layout on these ranks."""
    options = optimizer or Muon()
    module = load(variant(model, **changes))
    mesh = build_mesh(layout, torch.device("cpu"), pool)
    parallel = build_parallel_model(module, mesh, precision, seed, compilation, fp8_linears)
    built = build_optimizer(
        parallel.named_parameters(), module.OPTIMIZER_GROUPS, options, precision, torch.device("cpu"), mesh
    )
    return Trainer(parallel, built, clip)


def run_steps(trainer: Trainer, steps: range, rate: float = 0.02) -> list[StepResult]:
    """Train on given steps."""
    return [trainer.step(micro_batches(step, trainer.model.mesh), rate) for step in steps]


def whole_parameters(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All parameters, gathered."""
    named: dict[str, Any] = dict(trainer.model.named_parameters())
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()
        for name, p in named.items()
    }


def train(layouts: list[Layout]) -> list[Outcome]:
    """Each layout in turn, from the same seed, for two steps."""
    outcomes = []
    pool = MeshPool(torch.device("cpu"))
    for layout in layouts:
        trainer = make_trainer(layout, pool=pool)
        results = run_steps(trainer, range(2))
        outcomes.append(
            Outcome([r.loss for r in results], [r.gradient_norm for r in results], whole_parameters(trainer))
        )
    return outcomes


ADAMW = AdamW()
