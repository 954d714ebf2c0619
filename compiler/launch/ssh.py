"""Hosts over ssh: one script that copies the build, checks the hosts, and trains, again after a failure."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path

from shipway.compiler.launch.job import Programme
from shipway.compiler.launch.processes import leader
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.target import Command, JobState, Run
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import SshTarget
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

PAUSE_SECONDS = 5
"""Between two attempts."""


class Ssh:
    """torchrun over ssh."""

    def render(self, programme: Programme) -> dict[str, str]:
        """The driver, which runs where the launch is made."""
        target = _target(programme)
        script = fill(
            "launch/ssh/run.sh.j2",
            name=programme.name,
            plan_hash=programme.plan_hash,
            regenerate=programme.regenerate,
            target=target,
            hosts=target.hosts,
            workdir=target.workdir.removeprefix("~/"),  # every command starts in the home folder
            nodes=programme.largest.nodes,
            segments=segments(programme),
            pause_seconds=PAUSE_SECONDS,
        )
        return {"ssh/run.sh": script}

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """An ssh client; that there are hosts enough, the blueprint's validation has seen."""
        if shutil.which("ssh"):
            return []
        return [
            Diagnostic(
                code="LA040",
                summary="there is no ssh here",
                field="cluster.target.kind",
                help="install an OpenSSH client; `--dry-run` works anywhere",
            )
        ]

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Whether every host answers and has Shipway."""
        target = _target(programme)
        word = f"{shlex.quote(target.python)} -c 'import shipway.runtime'"
        options = ("-o", "BatchMode=yes", "-o", "ConnectTimeout=10", *target.options)
        return [Command(("ssh", *options, host, word), f"{host} has Shipway") for host in target.hosts]

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """The driver, in the foreground: it is the supervisor."""
        script = run.build / "launch" / "ssh" / "run.sh"
        purpose = f"train on {programme.largest.nodes} hosts"
        return [Command(("bash", str(script), str(run.folder)), purpose, foreground=True)]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """None: the driver is the job."""
        return ()

    def status(self, record: RunRecord) -> list[Command]:
        """Nobody to ask: the run's folder says it."""
        return []

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """None: see `status`."""
        return []

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """Files in the run's folder: the driver collects them."""
        return None

    def cancel(self, record: RunRecord, run: Run) -> list[Command]:
        """The driver passes it on to every host."""
        lead = leader(run.folder)
        if lead is None:
            return []
        arguments = ("kill", "-TERM", str(lead.pid))
        purpose = "let the workers on all hosts save and leave"
        return [Command(arguments if lead.here else ("ssh", lead.host, *arguments), purpose)]

    def accusations(self, record: RunRecord) -> list[Command]:
        """None: the driver writes the run's own list."""
        return []

    def accused(self, output: str) -> tuple[str, ...]:
        """None: see `accusations`."""
        return ()

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """They can be left out: the driver reads the list."""
        return None


def _target(programme: Programme) -> SshTarget:
    target = programme.cluster.target
    assert isinstance(target, SshTarget)
    return target
