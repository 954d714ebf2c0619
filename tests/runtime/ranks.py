"""Real process groups in tests: a function runs on every rank of a gloo world, its results come back."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.utils.tensorboard", "shipway.runtime.session"]
"""Imported once in the server that ranks are forked from, since importing torch takes seconds."""
TIMEOUT_SECONDS = 240


def run_ranks(function: Callable[..., Any], world_size: int, *arguments: Any) -> list[Any]:
    """Results of `function(*arguments)` in rank order; raises with the first failing rank's trace."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with TemporaryDirectory() as folder:
        processes = [
            context.Process(target=_rank, args=(function, rank, world_size, folder, arguments), daemon=True)
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        for process in processes:
            process.join(TIMEOUT_SECONDS)
        alive = [rank for rank, process in enumerate(processes) if process.is_alive()]
        for process in processes:
            process.kill()
        outcomes = [_outcome(Path(folder) / f"{rank}") for rank in range(world_size)]
    for rank, (worked, value) in enumerate(outcomes):
        if not worked and rank not in alive and not _is_consequence(value):
            raise AssertionError(f"rank {rank} of {world_size}:\n{value}")
    for rank, (worked, value) in enumerate(outcomes):
        if not worked:
            raise AssertionError(f"rank {rank} of {world_size} (alive: {alive}):\n{value}")
    return [value for _, value in outcomes]


def _rank(function: Callable[..., Any], rank: int, world_size: int, folder: str, arguments: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is no garbage: a rank that looks through it copies its pages
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": str(rank)}
    store = dist.FileStore(f"{folder}/store", world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    try:
        outcome: tuple[bool, Any] = (True, function(*arguments))
        dist.barrier()
    except BaseException:
        outcome = (False, traceback.format_exc())
    Path(folder, f"{rank}").write_bytes(pickle.dumps(outcome))
    os._exit(0)  # peers may have failed: no collective shutdown


def _outcome(path: Path) -> tuple[bool, Any]:
    if not path.exists():
        return False, "it left no result"
    worked, value = pickle.loads(path.read_bytes())
    return worked, value


def _is_consequence(trace: str) -> bool:
    """Whether a trace is only that of a peer's end."""
    return "Connection" in trace or "left no result" in trace
