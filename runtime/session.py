"""One start of a run on one rank: what lives as long as the process, put together and taken down."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import ModuleType

import torch
import torch.distributed as dist

from shipway.runtime.build_folder import import_model, read_plan
from shipway.runtime.checkpoint import Checkpointer
from shipway.runtime.context import Context
from shipway.runtime.distributed import host_groups
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.mesh import MeshPool
from shipway.runtime.metrics import MetricsWriter
from shipway.runtime.programme import run_programme
from shipway.runtime.progress import Display, make_display
from shipway.runtime.report import try_report
from shipway.runtime.run_folder import RunFolder, replace_text
from shipway.runtime.signals import StopRequest
from shipway.runtime.watchdog import Limits, Watchdog
from shipway.schemas.plan import Plan


def train_here(
    build: Path,
    run: RunFolder,
    device: torch.device,
    stop: StopRequest,
    until: str | None = None,
    display: Display | None = None,
) -> ExitCode:
    """Train a build on this rank of an initialised world, from where the run stands; raises on failure."""
    plan = read_plan(build)
    module = import_model(build)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rank = dist.get_rank()
    if rank == 0 and build.resolve() != run.path.resolve():
        replace_text(run.path / "plan.json", (build / "plan.json").read_text())
    context = _context(plan, module, build, run, device, stop, display or make_display(rank))
    stop.install()  # not before all ranks are connected: from now on a peer's end is noticed at once
    try:
        code = run_programme(context, until)
        context.watchdog.stop()
        context.checkpointer.close()
        if context.metrics:
            run.write_status(state=code.words)
            context.display.message(try_report(run.path))
        return code
    except BaseException as error:
        if where := context.watchdog.where():
            error.add_note(where)  # what is said of it names the step as well as rank and host
        raise
    finally:
        context.display.close()
        if context.metrics:
            context.metrics.close()


def _context(
    plan: Plan,
    module: ModuleType,
    build: Path,
    run: RunFolder,
    device: torch.device,
    stop: StopRequest,
    display: Display,
) -> Context:
    groups, checkpoints = host_groups(), plan.blueprint.training.checkpoints
    return Context(
        plan=plan,
        module=module,
        build=build,
        run=run,
        device=device,
        meshes=MeshPool(device),
        groups=groups,
        checkpointer=Checkpointer(
            run.checkpoints, groups, checkpoints.keep_last, checkpoints.asynchronous, plan.hash
        ),
        stop=stop,
        display=display,
        watchdog=_watchdog(plan, run),
        metrics=_metrics(plan, run, display) if dist.get_rank() == 0 else None,
    )


def _metrics(plan: Plan, run: RunFolder, display: Display) -> MetricsWriter:
    """The writer of rank 0, and whoever else the blueprint wants told."""
    options = plan.blueprint.training.observability
    exporter = reporter = None
    if options.weights_and_biases is not None:
        from shipway.runtime.weights_and_biases import Reporter

        reporter = Reporter(options.weights_and_biases, plan, run.path)
    if options.prometheus_port is not None:
        from shipway.runtime.prometheus import Exporter

        exporter = Exporter(options.prometheus_port, {"run": run.path.name, "blueprint": plan.name})
        display.message(f"figures for Prometheus at http://{socket.gethostname()}:{exporter.port}/metrics")
    return MetricsWriter(run.metrics, run.path / "tensorboard", exporter, reporter)


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
