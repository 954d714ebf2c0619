"""What the processes of the parity table do: train under each row's layout and leave a trace."""

from __future__ import annotations

import gc
import logging
import os
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import Tensor

from shipway.runtime.build_folder import import_model, read_plan
from shipway.runtime.mesh import Mesh, MeshPool, build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.parity.batches import BatchKind, micro_batches, shunned_experts
from shipway.runtime.parity.table import Row
from shipway.runtime.routing import routers
from shipway.runtime.trainer import StepResult, Trainer
from shipway.schemas.training import Muon, Precision

STEPS = 3
SEED = 8
"""In its first step no token's last chosen and first refused expert are as near as rounding."""
LEARNING_RATE = 0.01
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shipway.runtime.trainer"]
TIMEOUT = timedelta(seconds=180)
"""After which peers of a rank that failed give up."""
BIASED_OUT = -50.0
"""Balancing bias of an expert that no token shall choose; scores are at most 1."""


@dataclass
class Trace:
    """What a layout gave."""

    losses: list[float]
    norms: list[float]
    loads: dict[str, list[int]]
    """Choices of each expert in the first step, by layer."""
    gradients: dict[str, Tensor]
    """Whole gradients of the first step, before clipping, by parameter."""


@dataclass(frozen=True)
class Setting:
    """What all rows of one table share."""

    builds: Mapping[str, Path]
    """Build folder of each model."""
    device: str
    precision: Precision


def run_rows(rows: Sequence[Row], setting: Setting) -> list[Trace | str]:
    """The trace of each row, or why it failed; all must have the same number of ranks.

    One set of processes trains row after row; what follows a row that fails gets a new set.
    """
    found: list[Trace | str] = []
    while len(found) < len(rows):
        found += _run_until_failure(rows[len(found) :], setting)
    return found


def _run_until_failure(rows: Sequence[Row], setting: Setting) -> list[Trace | str]:
    ranks = rows[0].layout.world_size
    with TemporaryDirectory() as folder:
        # Ranks fork from a process that has imported torch and never touched a device.
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        context = multiprocessing.start_processes(
            _rank, (ranks, rows, setting, folder), nprocs=ranks, join=False, start_method="forkserver"
        )
        lost = "it left no result"
        try:
            while not context.join():
                pass
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            lost = str(error)
        found: list[Trace | str] = []
        for index in range(len(rows)):
            found.append(_read(Path(folder), index, ranks, lost))
            if isinstance(found[-1], str):
                break
        return found


def _read(folder: Path, index: int, ranks: int, lost: str) -> Trace | str:
    """Traces of all ranks joined: pipeline stages hold different parameters."""
    paths = [folder / f"{index}.{rank}" for rank in range(ranks)]
    parts = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    # Peers of a rank that failed only say that it has gone.
    reasons = sorted((part for part in parts if isinstance(part, str)), key=lambda text: "onnection" in text)
    if reasons or len(parts) < ranks:
        return reasons[0] if reasons else lost
    gradients = {name: value for part in parts for name, value in part.gradients.items()}
    loads = {name: value for part in parts for name, value in part.loads.items()}
    return Trace(parts[0].losses, parts[0].norms, loads, gradients)


def _rank(rank: int, ranks: int, rows: Sequence[Row], setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork is no garbage
    # Gathering a gradient that is sharded twice is slow, which matters to nobody here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    on_gpus = setting.device == "cuda"
    here = torch.device("cuda", rank) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(here)
    store = dist.FileStore(f"{folder}/store", ranks)
    backend = "nccl" if on_gpus else "gloo"
    dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=TIMEOUT)
    builds, pool = {row.model: setting.builds[row.model] for row in rows}, MeshPool(here)
    modules = {model: import_model(build) for model, build in builds.items()}
    linears = {model: read_plan(build).fp8_linears for model, build in builds.items()}
    for index, row in enumerate(rows):
        path = Path(folder) / f"{index}.{rank}"
        try:
            traced = trace(modules[row.model], row, pool, setting.precision, linears[row.model])
            torch.save(traced, path)
        except Exception:
            torch.save(traceback.format_exc(), path)
            raise
    dist.barrier()
    dist.destroy_process_group()


def trace(
    module: ModuleType, row: Row, pool: MeshPool, precision: Precision, fp8_linears: Sequence[str] = ()
) -> Trace:
    """Train a few steps; every rank must call it."""
    mesh = build_mesh(row.layout, pool.device, pool)
    trainer = _trainer(module, mesh, precision, fp8_linears)
    gradients: dict[str, Tensor] = {}
    update = trainer.optimizer.step

    def step(rate: float) -> None:
        if not gradients:
            gradients.update(_whole_gradients(trainer))
        update(rate)

    trainer.optimizer.step = step  # type: ignore[method-assign]
    _shun(trainer, row.batch)
    results: list[StepResult] = [
        trainer.step(micro_batches(number, mesh, module.VOCABULARY, row.batch), LEARNING_RATE)
        for number in range(STEPS)
    ]
    loads = {name: load.tolist() for name, load in results[0].expert_loads.items()}
    return Trace([r.loss for r in results], [r.gradient_norm for r in results], loads, gradients)


def _trainer(module: ModuleType, mesh: Mesh, precision: Precision, fp8_linears: Sequence[str]) -> Trainer:
    model = build_parallel_model(module, mesh, precision, SEED, fp8_linears=fp8_linears)
    optimizer = build_optimizer(
        model.named_parameters(), module.OPTIMIZER_GROUPS, Muon(), precision, mesh.device, mesh
    )
    return Trainer(model, optimizer, gradient_clip=None)


def _shun(trainer: Trainer, kind: BatchKind) -> None:
    for router in routers(trainer.model).values():
        if hasattr(router, "balance_bias"):
            router.balance_bias[shunned_experts(kind, len(router.balance_bias))] = BIASED_OUT


def _whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gathered from all ranks that share a parameter."""
    whole = {}
    for name, parameter in trainer.model.named_parameters().items():
        gradient = parameter.grad
        assert gradient is not None
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole[name] = full.detach().float().cpu().clone()
    return whole
