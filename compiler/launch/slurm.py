"""Slurm: one batch script per stage, chained by dependencies; requeued by the scripts themselves."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from shipway.compiler.launch import environment
from shipway.compiler.launch.job import Programme, StageJob
from shipway.compiler.launch.target import Command, JobState, Run, State
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import SlurmTarget
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

_STATES: dict[str, State] = {
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_HOLD": "waiting",
    "SUSPENDED": "waiting", "RUNNING": "running", "COMPLETING": "running", "COMPLETED": "done",
    "CANCELLED": "stopped", "FAILED": "failed", "TIMEOUT": "failed", "NODE_FAIL": "failed",
    "OUT_OF_MEMORY": "failed", "BOOT_FAIL": "failed", "DEADLINE": "failed", "PREEMPTED": "waiting",
}  # fmt: skip


class Slurm:
    """sbatch and srun."""

    def render(self, programme: Programme) -> dict[str, str]:
        """One script per stage, and one that submits them."""
        files = {f"slurm/{stage.slug}.sbatch": stage_script(programme, stage) for stage in programme.stages}
        header = {
            "name": programme.name,
            "plan_hash": programme.plan_hash,
            "regenerate": programme.regenerate,
        }
        files["slurm/submit.sh"] = fill("launch/slurm/submit.sh.j2", **header, stages=programme.stages)
        return files

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """sbatch is there, a container image given as a path exists, and the limit leaves time to train."""
        target = _target(programme)
        found = []
        if shutil.which("sbatch") is None:
            found.append(
                Diagnostic(
                    code="LA010",
                    summary="there is no sbatch here",
                    field="cluster.target.kind",
                    help="launch from a login node of the cluster; `--dry-run` works anywhere",
                )
            )
        if target.container and "/" in target.container and target.container.endswith((".sif", ".sqsh")):
            image = Path(target.container)
            if not image.exists():
                found.append(
                    Diagnostic(
                        code="LA011",
                        summary=f"the container image {image} does not exist",
                        field="cluster.target.container",
                        help="container/ in the build folder says how to make it",
                    )
                )
        if target.time_limit < 2 * programme.save_seconds:
            found.append(
                Diagnostic(
                    code="LA012",
                    summary="the time limit leaves no time to train: half of it goes into one save",
                    field="cluster.target.time_limit",
                    because=(
                        f"the time limit is {target.time_limit:.0f} s",
                        f"a save may take {programme.save_seconds} s on this storage",
                    ),
                    help="raise cluster.target.time_limit or cluster.storage.write_bandwidth",
                )
            )
        return found

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Whether the site could ever run each stage."""
        folder = build / "launch" / "slurm"
        return [
            Command(
                ("sbatch", "--test-only", str(folder / f"{stage.slug}.sbatch"), str(build), "run"),
                f"stage {stage.name} could run here",
            )
            for stage in programme.stages
        ]

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """The build's own submit script."""
        script = run.build / "launch" / "slurm" / "submit.sh"
        return [
            Command(
                ("bash", str(script), str(run.folder)),
                "submit every stage that is not done, each after the one before it",
                {"SHIPWAY_PYTHON": os.environ.get("SHIPWAY_PYTHON", sys.executable)},
            )
        ]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """`STAGE ID` lines of the submit script."""
        pairs = (line.rsplit(" ", 1) for line in output.splitlines() if " " in line)
        return tuple(Job(stage=stage, id=job) for stage, job in pairs if job != "done")

    def status(self, record: RunRecord) -> list[Command]:
        """squeue for those in the queue; sacct, where the site keeps accounts, for the rest."""
        jobs = ",".join(job.id for job in record.jobs)
        queue = ("squeue", "--noheader", "--states=all", f"--jobs={jobs}", "--format=%i|%T|%r")
        return [Command(queue, "ask the queue")] if jobs else []

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """`id|state|reason` lines; a job that the queue has forgotten is judged by the attempts."""
        seen = {}
        for line in output.splitlines():
            job, _, rest = line.partition("|")
            word, _, reason = rest.partition("|")
            detail = f"{word.lower()} ({reason})" if reason not in ("", "None") else word.lower()
            seen[job] = (_STATES.get(word, "unknown"), detail)
        return [
            JobState(job, *seen[job.id]) if job.id in seen else JobState(job, "unknown", "left the queue")
            for job in record.jobs
        ]

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """Files in the run's folder."""
        return None

    def cancel(self, record: RunRecord, run: Run) -> list[Command]:
        """Later stages leave the queue first, so that none starts while the running one saves."""
        jobs = [job.id for job in reversed(record.jobs)]
        if not jobs:
            return []
        return [
            Command(("scancel", "--state=PENDING", *jobs), "take waiting stages out of the queue"),
            Command(("scancel", "--batch", "--signal=USR1", *jobs), "let the running stage save and leave"),
        ]

    def accusations(self, record: RunRecord) -> list[Command]:
        """None: the scripts write the run's own list."""
        return []

    def accused(self, output: str) -> tuple[str, ...]:
        """None: see `accusations`."""
        return ()

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """They can be left out: `sbatch --exclude`."""
        return None


def stage_script(programme: Programme, stage: StageJob) -> str:
    """The batch script of one stage."""
    target = _target(programme)
    network = programme.cluster.network
    allocated = stage.nodes + target.spare_nodes
    following = [other.slug for other in programme.stages if other.number == stage.number + 1]
    return fill(
        "launch/slurm/stage.sbatch.j2",
        name=programme.name,
        plan_hash=programme.plan_hash,
        regenerate=programme.regenerate,
        stage=stage,
        size=stage.describe(programme.on_gpus),
        most_restarts=target.restarts + expected_restarts(programme),
        stages=len(programme.stages),
        next_slug=following[0] if following else "",
        job_name=f"{programme.slug}-{stage.slug}",
        target=target,
        apptainer=bool(target.container) and str(target.container).endswith(".sif"),
        on_gpus=programme.on_gpus,
        devices_per_node=programme.cluster.devices_per_node,
        time_limit=slurm_time(target.time_limit),
        one_leaf=bool(network and network.nodes_per_leaf and 1 < allocated <= network.nodes_per_leaf),
        save_seconds=programme.save_seconds,
        layers=environment.layers(programme),
    )


def expected_restarts(programme: Programme) -> int:
    """Times that the planned hours make jobs reach their time limit, over all stages."""
    usable_seconds = max(1.0, _target(programme).time_limit - programme.save_seconds)
    return sum(int(stage.hours * 3600 / usable_seconds) for stage in programme.stages)


def slurm_time(seconds: float) -> str:
    """`days-hours:minutes:seconds`, as sbatch takes it."""
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return f"{days}-{hour:02d}:{minute:02d}:{second:02d}"


def _target(programme: Programme) -> SlurmTarget:
    target = programme.cluster.target
    assert isinstance(target, SlurmTarget)
    return target
