"""What the processes of the parity table do: train under each row's layout and leave a trace."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
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
from shipway.runtime.gradients import gradient_norm
from shipway.runtime.initialise import initialise
from shipway.runtime.kernels.dispatch import OVERRIDE
from shipway.runtime.mesh import Mesh, MeshPool, build_mesh
from shipway.runtime.optimizers import build_optimizer
from shipway.runtime.parallelize import build_parallel_model
from shipway.runtime.parity.batches import BatchKind, micro_batches, shunned_experts
from shipway.runtime.parity.groups import GROUPS, group_of
from shipway.runtime.parity.table import Row
from shipway.runtime.routing import routers
from shipway.runtime.trainer import StepResult, Trainer
from shipway.schemas.training import Muon, Precision

STEPS = 3
SEED = 8
"""In its first step no token's last chosen and first refused expert are as near as rounding."""
LEARNING_RATE = 0.01
PRELOADED = ["torch", "torch.distributed.fsdp", "torch.distributed.pipelining", "shipway.runtime.trainer"]
TIMEOUT = timedelta(seconds=120)
"""After which peers of a rank that failed give up."""
POLL_SECONDS = 0.05
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
    group_norms: dict[str, float]
    """Norms of the same by group, as the trainer takes that of all: over the ranks, without gathering."""


@dataclass(frozen=True)
class Setting:
    """What all rows of one table share."""

    builds: Mapping[str, Path]
    """Build folder of each model."""
    device: str
    precision: Precision
    plain: bool = False
    """Whether the plain forms of kernels serve, wherever there are faster ones."""


def run_rows(rows: Sequence[Row], setting: Setting, until: float = math.inf) -> Iterator[Trace | str]:
    """The trace of each row as soon as it is there, or why it failed; all have the same number of ranks.

    One set of processes trains row after row; what follows a row that fails gets a new set. No row is waited
    for after `until` (time.monotonic).
    """
    done = 0
    while done < len(rows) and time.monotonic() < until:
        for found in _run_until_failure(rows[done:], setting, until):
            done += 1
            yield found


def _run_until_failure(rows: Sequence[Row], setting: Setting, until: float) -> Iterator[Trace | str]:
    ranks = rows[0].layout.world_size
    with TemporaryDirectory() as folder:
        # Ranks fork from a process that has imported torch and never touched a device.
        multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOADED)
        context = multiprocessing.start_processes(
            _rank, (ranks, rows, setting, folder), nprocs=ranks, join=False, start_method="forkserver"
        )
        try:
            for index in range(len(rows)):
                lost = _wait(context, [_path(folder, index, rank) for rank in range(ranks)], until)
                if lost is None:
                    return  # time is up
                yield (found := _read(Path(folder), index, ranks, lost))
                if isinstance(found, str):
                    return
        finally:
            for process in context.processes:
                process.kill()
                process.join()


def _wait(context: multiprocessing.ProcessContext, results: Sequence[Path], until: float) -> str | None:
    """Until all results are there or ranks have ended: what is said of missing ones; None when time is up."""
    while not all(path.exists() for path in results):
        if time.monotonic() > until:
            return None
        try:
            if context.join(POLL_SECONDS):
                break
        except (multiprocessing.ProcessRaisedException, multiprocessing.ProcessExitedException) as error:
            return str(error)
    return "it left no result"


def _path(folder: str, index: int, rank: int) -> Path:
    return Path(folder) / f"{index}.{rank}"


def _read(folder: Path, index: int, ranks: int, lost: str) -> Trace | str:
    """Traces of all ranks joined: pipeline stages hold different parameters."""
    paths = [_path(str(folder), index, rank) for rank in range(ranks)]
    parts = [torch.load(path, weights_only=False) for path in paths if path.exists()]
    # Peers of a rank that failed only say that it has gone.
    reasons = sorted((part for part in parts if isinstance(part, str)), key=lambda text: "onnection" in text)
    if reasons or len(parts) < ranks:
        return reasons[0] if reasons else lost
    gradients = {name: value for part in parts for name, value in part.gradients.items()}
    loads = {name: value for part in parts for name, value in part.loads.items()}
    return Trace(parts[0].losses, parts[0].norms, loads, gradients, parts[0].group_norms)


def _rank(rank: int, ranks: int, rows: Sequence[Row], setting: Setting, folder: str) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what was imported before the fork is no garbage
    # Gathering a gradient that is sharded twice is slow, which matters to nobody here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    if setting.plain:
        os.environ[OVERRIDE] = "plain"
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
        path = _path(folder, index, rank)
        try:
            _put(path, trace(modules[row.model], row, pool, setting.precision, linears[row.model]))
        except Exception:
            _put(path, traceback.format_exc())
            raise
    dist.barrier()
    dist.destroy_process_group()


def _put(path: Path, result: Trace | str) -> None:
    """Whole or not at all: who waits for it reads it at once."""
    part = path.with_suffix(path.suffix + ".part")
    torch.save(result, part)
    part.rename(path)


def trace(
    module: ModuleType,
    row: Row,
    pool: MeshPool,
    precision: Precision,
    fp8_linears: Sequence[str] = (),
    steps: int = STEPS,
) -> Trace:
    """Train a few steps; every rank must call it."""
    mesh = build_mesh(row.layout, pool.device, pool)
    trainer = _trainer(module, mesh, precision, fp8_linears)
    gradients: dict[str, Tensor] = {}
    norms: dict[str, float] = {}
    update = trainer.optimizer.step

    def step(rate: float) -> None:
        if not gradients:
            gradients.update(_whole_gradients(trainer))
            norms.update(_group_norms(trainer))
        update(rate)

    trainer.optimizer.step = step  # type: ignore[method-assign]
    _shun(trainer, row.batch)
    results: list[StepResult] = [
        trainer.step(micro_batches(number, mesh, module.VOCABULARY, row.batch), LEARNING_RATE)
        for number in range(steps)
    ]
    loads = {name: load.tolist() for name, load in results[0].expert_loads.items()}
    return Trace([r.loss for r in results], [r.gradient_norm for r in results], loads, gradients, norms)


def _trainer(module: ModuleType, mesh: Mesh, precision: Precision, fp8_linears: Sequence[str]) -> Trainer:
    model = build_parallel_model(module, mesh, precision, SEED, fp8_linears=fp8_linears)
    if mesh.device.type != "cpu":  # the same weights on every kind of device
        for part in model.parts:
            initialise(part, SEED, torch.device("cpu"))
    optimizer = build_optimizer(
        model.named_parameters(), module.OPTIMIZER_GROUPS, Muon(), precision, mesh.device, mesh
    )
    return Trainer(model, optimizer, gradient_clip=None)


def _shun(trainer: Trainer, kind: BatchKind) -> None:
    for router in routers(trainer.model).values():
        if hasattr(router, "balance_bias"):
            router.balance_bias[shunned_experts(kind, len(router.balance_bias))] = BIASED_OUT


def _group_norms(trainer: Trainer) -> dict[str, float]:
    parameters = trainer.model.named_parameters()
    members = {group: [p for n, p in parameters.items() if group_of(n) == group] for group in GROUPS}
    return {group: float(gradient_norm(some, trainer.model.mesh)) for group, some in members.items()}


def _whole_gradients(trainer: Trainer) -> dict[str, Tensor]:
    """Gathered from all ranks that share a parameter."""
    whole = {}
    for name, parameter in trainer.model.named_parameters().items():
        gradient = parameter.grad
        assert gradient is not None
        full = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        whole[name] = full.detach().float().cpu().clone()
    return whole
