"""Entry point of every training process: `python -m shipway.runtime.main BUILD --run-dir RUN`.

Started by torchrun on every rank. Exit codes: `shipway.runtime.exit_codes`.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shipway.runtime.build_folder import import_model, read_plan
from shipway.runtime.checkpoint import Checkpointer
from shipway.runtime.context import Context
from shipway.runtime.data.errors import DataError
from shipway.runtime.distributed import host_groups, join, leave
from shipway.runtime.exit_codes import ExitCode, Fatal, Retryable
from shipway.runtime.metrics import MetricsWriter
from shipway.runtime.programme import run_programme
from shipway.runtime.progress import make_display
from shipway.runtime.report import try_report
from shipway.runtime.run_folder import RunFolder, replace_text
from shipway.runtime.signals import StopRequest
from shipway.runtime.watchdog import Limits, Watchdog
from shipway.schemas.plan import Plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shipway.runtime.main", description=__doc__)
    parser.add_argument("build", type=Path, help="folder that `shipway build` wrote")
    parser.add_argument(
        "--run-dir", type=Path, required=True, help="folder of the run; created, or continued"
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is one")
    parser.add_argument("--until", metavar="STAGE", help="last stage to train here; by default all of them")
    options = parser.parse_args(arguments)
    run = RunFolder(options.run_dir)
    rank = int(os.environ.get("RANK", "0"))
    run.write_pid(rank)
    # Attention residuals pass their sources on through every layer, unchanged and never written into.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    stop = StopRequest()
    stop.install()
    code, reason = ExitCode.DONE, "the programme is finished"
    try:
        code = _train(options.build, run, options.device, stop, options.until)
        reason = code.words
        leave()
    except BaseException as error:
        code, reason = classify(error)
        if code is ExitCode.FATAL and not isinstance(error, (Fatal, DataError)):
            traceback.print_exc()
        print(f"rank {rank} on {socket.gethostname()}: {reason}", file=sys.stderr, flush=True)
    run.write_exit(rank, code, reason)
    if code not in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.NO_PROGRESS):
        # Other ranks may never reach a collective shutdown: do not wait for them.
        os._exit(code)
    return code


def _train(
    build: Path, run: RunFolder, device_kind: str | None, stop: StopRequest, until: str | None
) -> ExitCode:
    plan = read_plan(build)
    module = import_model(build)
    device = join(device_kind)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    groups, rank = host_groups(), dist.get_rank()
    if rank == 0 and build.resolve() != run.path.resolve():
        replace_text(run.path / "plan.json", (build / "plan.json").read_text())
    checkpoints = plan.blueprint.training.checkpoints
    checkpointer = Checkpointer(
        run.checkpoints, groups, checkpoints.keep_last, checkpoints.asynchronous, plan.hash
    )
    writer = MetricsWriter(run.metrics, run.path / "tensorboard") if rank == 0 else None
    display = make_display(rank)
    watchdog = _watchdog(plan, run)
    context = Context(plan, module, build, run, device, groups, checkpointer, stop, display, watchdog, writer)
    try:
        code = run_programme(context, until)
        watchdog.stop()
        checkpointer.close()
        if writer:
            run.write_status(state="done" if code is ExitCode.DONE else code.words)
            display.message(try_report(run.path))
        return code
    finally:
        display.close()
        if writer:
            writer.close()


def _watchdog(plan: Plan, run: RunFolder) -> Watchdog:
    faults, rank = plan.blueprint.training.faults, dist.get_rank()
    watchdog = Watchdog(
        rank,
        dist.get_world_size(),
        Limits(faults.hang_factor, faults.hang_minimum),
        # A connection of its own: the main thread may hang inside a wait on the default one.
        dist.distributed_c10d._get_default_store().clone(),
        run.attempt / f"rank{rank}.stacks",
        on_hang=lambda text: run.write_exit(rank, ExitCode.RETRYABLE, text),
    )
    watchdog.start()
    return watchdog


def classify(error: BaseException) -> tuple[ExitCode, str]:
    """Exit code of a failure and the words for it."""
    if isinstance(error, (Fatal, DataError)):
        return ExitCode.FATAL, str(error)
    if isinstance(error, Retryable):
        return ExitCode.RETRYABLE, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ExitCode.FATAL, f"out of device memory; the plan's budget was too small: {error}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (dist.DistError, OSError, KeyboardInterrupt)) or _is_lost_peer(error):
        return ExitCode.RETRYABLE, text
    return ExitCode.FATAL, text


def _is_lost_peer(error: BaseException) -> bool:
    """Gloo reports a lost peer as a bare RuntimeError."""
    words = ("Connection", "connection", "gloo", "NCCL", "timed out", "Timed out")
    return isinstance(error, RuntimeError) and any(word in str(error) for word in words)


if __name__ == "__main__":
    sys.exit(main())
