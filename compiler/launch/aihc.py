"""Baidu AI Cloud's AIHC: one CreateJob request, whose RANK and WORLD_SIZE count nodes.

API v2: https://cloud.baidu.com/doc/AIHC/s/Hmayv96tj (request) and .../s/Imb0gupts (data structures).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from shipway.compiler.launch.job import Programme, slug
from shipway.compiler.launch.kubernetes import image_diagnostics
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.target import Command, JobState, Run, State
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import AihcTarget
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

_MEETING = """\
# The platform's RANK and WORLD_SIZE count nodes; a process that took them for its own would be wrong.
export SHIPWAY_HEAD=$MASTER_ADDR:$MASTER_PORT SHIPWAY_NODES=$WORLD_SIZE SHIPWAY_JOB=$AIHC_JOB_NAME
unset RANK WORLD_SIZE MASTER_ADDR MASTER_PORT
"""
_STATES: dict[str, State] = {
    "Created": "waiting", "Pending": "waiting", "Scheduled": "waiting",
    "Running": "running", "Restarting": "running",
    "Succeeded": "done", "Failed": "failed", "ManualTermination": "stopped", "Stopped": "stopped",
}  # fmt: skip


class Aihc:
    """Baidu AI Cloud's training service."""

    def render(self, programme: Programme) -> dict[str, str]:
        """The request's body for a run named after the blueprint, and the containers' first process."""
        start = fill(
            "launch/start.sh.j2",
            name=programme.name,
            plan_hash=programme.plan_hash,
            regenerate=programme.regenerate,
            meeting=_MEETING,
        )
        return {"aihc/create-job.json": body_text(programme, programme.slug), "start.sh": start}

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """A pinned image, keys in the environment, stages of one size."""
        found = image_diagnostics(_target(programme).image)
        if not os.environ.get("BCE_ACCESS_KEY_ID") or not os.environ.get("BCE_SECRET_ACCESS_KEY"):
            found.append(
                Diagnostic(
                    code="LA050",
                    summary="no keys for Baidu AI Cloud",
                    help="set BCE_ACCESS_KEY_ID and BCE_SECRET_ACCESS_KEY; they are never written anywhere",
                )
            )
        if len(segments(programme)) > 1:
            found.append(
                Diagnostic(
                    code="LA051",
                    summary="an AIHC job cannot change its size between stages",
                    field="training.stages",
                    because=tuple(
                        f"stage {stage.name} takes {stage.describe(programme.on_gpus)}"
                        for stage in programme.stages
                    ),
                    help="pin layouts of equal size",
                )
            )
        return found

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Nothing: the service answers at submission only."""
        return []

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """One CreateJob."""
        target = _target(programme)
        text = body_text(programme, slug(run.id), run.launch)
        return [_call(target, "CreateJob", {}, "create the job", text)]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """The id in the answer."""
        target, answer = _target(programme), _answer(output)
        job = answer.get("jobId") or answer.get("result", {}).get("jobId")
        where = f"{target.endpoint} {target.resource_pool} {target.queue}"
        return (Job(stage="all", id=f"{where} {job}"),) if job else ()

    def status(self, record: RunRecord) -> list[Command]:
        """DescribeJob."""
        return [_about(job, "DescribeJob", "ask for the job's state") for job in record.jobs]

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """The answer's status."""
        lines = [_answer(line) for line in output.splitlines() if line.startswith("{")]
        found = []
        for job, answer in zip(record.jobs, lines, strict=False):
            inside = answer.get("job") or answer.get("result") or answer
            word = str(inside.get("status", "unknown"))
            found.append(JobState(job, _STATES.get(word, "unknown"), word.lower()))
        return found

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """Of the pods, one after another, through the service."""
        return [_pods(job, "follow" if follow else "logs", "logs of all pods") for job in record.jobs]

    def cancel(self, record: RunRecord, run: Run) -> list[Command]:
        """StopJob ends the pods, in whose grace period they save."""
        return [_about(job, "StopJob", "end the pods; they save first") for job in record.jobs]

    def accusations(self, record: RunRecord) -> list[Command]:
        """What the pods' logs say."""
        return [_pods(job, "bad", "ask which nodes failed the pre-flight") for job in record.jobs]

    def accused(self, output: str) -> tuple[str, ...]:
        """A node a line."""
        return tuple(sorted(set(output.split())))

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """The request has no field for it (LA052); the platform replaces only what it finds broken itself."""
        return Diagnostic(
            code="LA052",
            summary=f"AIHC cannot be told to stay off {', '.join(nodes)}: the job may get there again",
            field="cluster.target.kind",
            help="Cordon it in the console or with `kubectl cordon`, then `shipway resume`.",
        )


def body(programme: Programme, run_name: str, launch: int = 1) -> dict[str, object]:
    """The body of CreateJob; a run that is resumed is another job in the same folder."""
    target, segment = _target(programme), segments(programme)[-1]
    stage, devices = segment.stage, programme.cluster.devices_per_node
    job_name = run_name if launch == 1 else f"{run_name}-r{launch}"
    environment = {"SHIPWAY_RUN": f"/runs/{run_name}", "SHIPWAY_LAUNCH": str(launch)}
    return {
        "name": job_name,
        "queue": target.queue,
        "jobType": "PyTorchJob",
        "jobSpec": {
            "image": target.image,
            "replicas": stage.nodes,
            "resources": [{"name": target.gpu_resource, "quantity": devices}],
            "envs": [{"name": name, "value": value} for name, value in environment.items()],
            "enableRDMA": stage.nodes > 1,
        },
        "command": f"bash /opt/shipway/build/launch/start.sh {stage.name}",
        "priority": target.priority,
        "labels": [{"key": "shipway.dev/plan", "value": programme.plan_hash.removeprefix("sha256:")[:63]}],
        "datasources": [
            {"type": "pfs", "name": target.storage, "sourcePath": target.storage_path, "mountPath": "/runs"}
        ],
        # The service's condition: two or more whole machines of A800 with RDMA.
        "enableBccl": stage.nodes >= 2 and devices == 8 and "a800" in target.gpu_resource,
        "faultTolerance": True,
        "faultToleranceArgs": "--enable-replace=true "  # of nodes that the platform itself finds broken
        f"--max-num-of-unconditional-retry={target.restarts}",
        "tensorboardConfig": {"enable": True, "logPath": f"/runs/{run_name}/tensorboard"},
    }


def body_text(programme: Programme, run_name: str, launch: int = 1) -> str:
    """`body` as JSON."""
    return json.dumps(body(programme, run_name, launch), indent=2, ensure_ascii=False) + "\n"


def _answer(text: str) -> dict[str, Any]:
    """The service's answer; empty when it is not what the interface says."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _call(target: AihcTarget, action: str, query: dict[str, str], purpose: str, text: str = "") -> Command:
    place = {"action": action, "resourcePoolId": target.resource_pool, "queueID": target.queue}
    url = f"{target.endpoint}/?{urlencode(place | query)}"
    return Command((sys.executable, "-m", "shipway.compiler.launch.bce", "POST", url), purpose, stdin=text)


def _about(job: Job, action: str, purpose: str) -> Command:
    endpoint, pool, queue, name = job.id.split(" ")
    query = urlencode({"action": action, "resourcePoolId": pool, "queueID": queue})
    url = f"{endpoint}/?{query}"
    arguments = (sys.executable, "-m", "shipway.compiler.launch.bce", "POST", url)
    return Command(arguments, purpose, stdin=json.dumps({"jobId": name}))


def _pods(job: Job, what: str, purpose: str) -> Command:
    arguments = (sys.executable, "-m", "shipway.compiler.launch.aihc_pods", what, *job.id.split(" "))
    return Command(arguments, purpose)


def _target(programme: Programme) -> AihcTarget:
    target = programme.cluster.target
    assert isinstance(target, AihcTarget)
    return target
