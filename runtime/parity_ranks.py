"""What the processes of the parity table do: train under each layout and leave a trace."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from shipway.runtime.build_folder import import_model
from shipway.runtime.data.batch import Batch
from shipway.runtime.mesh import Mesh, MeshPool, build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.trainer import StepResult, Trainer
from shipway.schemas.layout import Layout
from shipway.schemas.training import Muon, Precision

STEPS = 3
SEQUENCES = 8
MICRO_SEQUENCES = 2
CONTEXT_TOKENS = 256
"""Enough for four slices of whole delta-rule chunks under context parallel."""
SEED = 8
"""In its first step no token's last chosen and first refused expert are nearer than 3e-6 in score (CPU), so
that rounding moves no choice; seed 5 has a pair 1e-7 apart, which tensor parallel over 4 ranks swaps."""
LEARNING_RATE = 0.01
PRELOADED = ["torch", "torch.distributed.fsdp", "shipway.runtime.trainer"]
TIMEOUT = timedelta(seconds=180)
"""After which peers of a rank that failed give up."""


@dataclass
class Trace:
    """What a layout gave."""

    losses: list[float]
    norms: list[float]
    loads: dict[str, list[int]]
    """Choices of each expert in the first step, by layer."""
    gradients: dict[str, Tensor]
    """Whole gradients of the first step, before clipping, by parameter."""


def run_layouts(layouts: list[Layout], build: Path, device: str) -> list[Trace | str]:
    """The trace of each layout, or why it failed; all layouts must have the same number of ranks."""
    ranks = layouts[0].world_size
    with TemporaryDirectory() as folder:
        arguments = (ranks, layouts, build, device, folder)
        # Ranks fork from a process that has imported torch and never touched a device.
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(PRELOADED)
        context = multiprocessing.start_processes(
            _rank, arguments, nprocs=ranks, join=False, start_method="forkserver"
        )
        try:
            while not context.join():
                pass
            lost = "it left no result"
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            lost = str(error)
        return [_read(Path(folder), index, ranks, lost) for index in range(len(layouts))]


def _read(folder: Path, index: int, ranks: int, lost: str) -> Trace | str:
    """Traces of all ranks joined: pipeline stages hold different parameters."""
    parts: list[Trace] = []
    for rank in range(ranks):
        path = folder / f"{index}.{rank}"
        part = torch.load(path, weights_only=False) if path.exists() else lost
        if isinstance(part, str):
            return part
        parts.append(part)
    gradients = {name: value for part in parts for name, value in part.gradients.items()}
    loads = {name: value for part in parts for name, value in part.loads.items()}
    return Trace(parts[0].losses, parts[0].norms, loads, gradients)


def _rank(rank: int, ranks: int, layouts: list[Layout], build: Path, device: str, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(here)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    module, pool = import_model(build), MeshPool(here)
    for index, layout in enumerate(layouts):
        path = Path(folder) / f"{index}.{rank}"
        try:
            torch.save(trace(module, layout, pool), path)
        except Exception:
            torch.save(traceback.format_exc(), path)
            raise
    dist.barrier()
    dist.destroy_process_group()


def trace(module: ModuleType, layout: Layout, pool: MeshPool) -> Trace:
    """Train a few steps; every rank must call it."""
    mesh, precision = build_mesh(layout, pool.device, pool), Precision(compute="fp32")
    model = build_parallel_model(module, mesh, precision, SEED)
    optimizer = build_optimizer(
        model.named_parameters(), module.OPTIMIZER_GROUPS, Muon(), precision, pool.device
    )
    trainer = Trainer(model, optimizer, gradient_clip=None)
    gradients: dict[str, Tensor] = {}
    update = optimizer.step

    def step(rate: float) -> None:
        if not gradients:
            gradients.update(_whole_gradients(trainer))
        update(rate)

    optimizer.step = step  # type: ignore[method-assign]
    results: list[StepResult] = [
        trainer.step(micro_batches(number, mesh, module.VOCABULARY), LEARNING_RATE) for number in range(STEPS)
    ]
    loads = {name: load.tolist() for name, load in results[0].expert_loads.items()}
    return Trace([r.loss for r in results], [r.gradient_norm for r in results], loads, gradients)


def _whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gathered from all ranks that share a parameter."""
    whole = {}
    for name, parameter in trainer.model.named_parameters().items():
        gradient = parameter.grad
        assert gradient is not None
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole[name] = full.detach().cpu().clone()
    return whole


def step_rows(step: int, vocabulary: int) -> Batch:
    """The global batch of a step: uneven valid tokens, documents of uneven lengths across all borders."""
    generator = torch.Generator().manual_seed(step)
    shape = (SEQUENCES, CONTEXT_TOKENS)
    tokens = torch.randint(0, vocabulary, shape, generator=generator)
    labels = torch.randint(0, vocabulary, shape, generator=generator)
    for row in range(SEQUENCES):
        labels[row, : (29 * row) % 101] = -100
    cuts = [row * CONTEXT_TOKENS + cut for row in range(SEQUENCES) for cut in (0, 37 + 11 * row)]
    return Batch(tokens, labels, torch.tensor([*cuts, tokens.numel()], dtype=torch.int32))


def micro_batches(step: int, mesh: Mesh, vocabulary: int) -> list[Batch]:
    """This rank's micro-batches of a step."""
    whole = step_rows(step, vocabulary)
    share = SEQUENCES // mesh.data_parallel_size
    first = mesh.data_parallel_rank * share
    size = mesh.layout.micro_batch
    return [_rows(whole, start, start + size) for start in range(first, first + share, size)]


def _rows(batch: Batch, start: int, end: int) -> Batch:
    low, high = start * CONTEXT_TOKENS, end * CONTEXT_TOKENS
    bounds = batch.cu_seqlens
    inside = bounds[(bounds >= low) & (bounds <= high)] - low
    return Batch(batch.tokens[start:end], batch.labels[start:end], inside.to(torch.int32))
