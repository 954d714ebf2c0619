"""This machine: a supervisor that starts torchrun, and again after a failure, until the programme is done."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from shipway.compiler.launch import environment
from shipway.compiler.launch.devices import device_diagnostics
from shipway.compiler.launch.job import Programme
from shipway.compiler.launch.processes import agents, leader, stray_workers
from shipway.compiler.launch.target import Command, JobState, Run
from shipway.compiler.launch.templates import fill
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord


class Local:
    """torchrun under `shipway.runtime.supervisor`."""

    def render(self, programme: Programme) -> dict[str, str]:
        """What starts the supervisor, in the workers' environment."""
        largest = programme.largest
        script = fill(
            "launch/local/local.sh.j2",
            name=programme.name,
            plan_hash=programme.plan_hash,
            regenerate=programme.regenerate,
            size=largest.describe(programme.on_gpus).removeprefix("1 node of "),
            processes=largest.processes_per_node,
            layers=environment.layers(programme),
        )
        return {"local.sh": script} if largest.nodes == 1 else {}

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """The plan is for one node, and for devices that are here."""
        largest = programme.largest
        if largest.nodes == 1:
            return device_diagnostics(programme)
        return [
            Diagnostic(
                code="LA020",
                summary=f"stage {largest.name!r} needs {largest.nodes} nodes, and the target is this machine",
                field="cluster.target.kind",
                legal=("slurm", "kubernetes", "aihc", "ssh"),
                help="name the cluster's target, or plan for `cluster.nodes: 1`",
            )
        ]

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Nothing: `check` has seen this machine."""
        return []

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """The build's own script, which becomes the supervisor, in the foreground."""
        size = programme.largest.describe(programme.on_gpus).removeprefix("1 node of ")
        return [
            Command(
                ("bash", str(run.build / "launch" / "local.sh"), str(run.folder)),
                f"train on this machine with {size}",
                {"SHIPWAY_PYTHON": os.environ.get("SHIPWAY_PYTHON", sys.executable)},
                foreground=True,
                holds_signals=True,
            )
        ]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """The whole programme is one job, named after the supervisor's process."""
        return ()

    def status(self, record: RunRecord) -> list[Command]:
        """Nobody to ask: the run's folder says it."""
        return []

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """None: see `status`."""
        return []

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """Files in the run's folder."""
        return None

    def cancel(self, record: RunRecord, run: Run) -> list[Command]:
        """TERM to the supervisor, which lets the workers save; to the workers where it was killed."""
        lead = leader(run.folder)
        if lead is not None and not lead.here:
            on = ("ssh", lead.host, "kill", "-TERM", str(lead.pid))
            return [Command(on, f"let the workers on {lead.host} save and leave")]
        pids = [lead.pid] if lead is not None else stray_workers(run.folder) or agents(run.folder)
        if not pids:
            return []
        return [Command(("kill", "-TERM", *map(str, pids)), "let the workers save and leave")]

    def accusations(self, record: RunRecord) -> list[Command]:
        """None: there is one machine."""
        return []

    def accused(self, output: str) -> tuple[str, ...]:
        """None: see `accusations`."""
        return ()

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """There is no other machine to go to."""
        return Diagnostic(
            code="LA023",
            summary=f"a run on this machine cannot stay off {', '.join(nodes)}",
            field="cluster.target.kind",
            legal=("slurm", "kubernetes", "ssh"),
            help="leave --exclude out, or name a target that has other nodes",
        )
