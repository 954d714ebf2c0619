"""Two ways of starting the workers that a soak breaks: as in production, and quickly."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.distributed as dist

from bench.breaking import START_SECONDS, send
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.failures import classify
from shipway.runtime.progress import Silent
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest

PRELOADED = ["torch", "torch.distributed.fsdp", "torch.utils.tensorboard", "shipway.runtime.session"]
"""Imported once, in the server that ranks are forked from: importing torch takes seconds."""


def living_ranks(attempt: Path) -> list[int]:
    """Process ids that ranks have left in an attempt's folder, of those that live."""
    found = []
    for path in sorted(attempt.glob("rank*.pid"), key=lambda p: int(p.stem[4:])):
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            if b"shipway.runtime.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


class Torchrun:
    """A start under `shipway.runtime.elastic`, as supervisors and launch scripts make it."""

    def __init__(self, build: Path, run: Path, processes: int, attempt: int) -> None:
        self._folder = run / "attempts" / str(attempt)
        self._folder.mkdir(parents=True, exist_ok=True)
        for stale in self._folder.glob("rank*.pid"):
            stale.unlink()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "SHIPWAY_ATTEMPT": str(attempt),
            "SHIPWAY_ATTEMPT_FOLDER": str(self._folder),
        }
        command = [
            *(sys.executable, "-m", "shipway.runtime.elastic", "--nproc-per-node", str(processes)),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--max-restarts", "0"),
            *("-m", "shipway.runtime.main", str(build), "--run-dir", str(run), "--device", "cpu"),
        ]
        with (self._folder / "output.log").open("w") as log:
            self._agent = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def pids(self) -> list[int]:
        """As left in the attempt's folder."""
        return living_ranks(self._folder)

    def ask_to_stop(self, number: signal.Signals) -> None:
        """The agent passes it on."""
        self._agent.send_signal(number)

    def supervisor(self) -> int:
        """There is none."""
        raise NotImplementedError("started by hand")

    def wait(self) -> int:
        """The agent's code."""
        return self._agent.wait(START_SECONDS)


class Forked:
    """A start of ranks forked from a server that has torch imported; otherwise they do what torchrun's do."""

    def __init__(self, build: Path, run: Path, processes: int, attempt: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        store = f"{mkdtemp()}/store"
        self._ranks = [
            context.Process(target=_rank, args=(rank, processes, store, build, run, attempt), daemon=True)
            for rank in range(processes)
        ]
        for rank in self._ranks:
            rank.start()

    def pids(self) -> list[int]:
        """Of the ranks that live."""
        return [rank.pid for rank in self._ranks if rank.is_alive() and rank.pid is not None]

    def ask_to_stop(self, number: signal.Signals) -> None:
        """All ranks are told."""
        send(self.pids(), number)

    def supervisor(self) -> int:
        """There is none."""
        raise NotImplementedError("started by hand")

    def wait(self) -> int:
        """One code for all ranks: fatal above all; retryable where they differ, or a signal ended one."""
        for rank in self._ranks:
            rank.join(START_SECONDS)
        codes = [rank.exitcode for rank in self._ranks]
        if ExitCode.FATAL in codes or None in codes:
            return int(ExitCode.FATAL)
        return int(codes[0] or 0) if len(set(codes)) == 1 and codes[0] >= 0 else int(ExitCode.RETRYABLE)


def _rank(rank: int, processes: int, store: str, build: Path, run: Path, attempt: int) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server imported is no garbage: a rank that looks through it copies its pages
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(processes), "SHIPWAY_ATTEMPT": str(attempt)}
    stop = StopRequest()
    stop.install()
    dist.init_process_group("gloo", store=dist.FileStore(store, processes), rank=rank, world_size=processes)
    try:
        code = train_here(build, RunFolder(run), torch.device("cpu"), stop, display=Silent())
    except BaseException as error:
        code, reason = classify(error)
        RunFolder(run).write_exit(rank, code, reason)
    os._exit(code)
