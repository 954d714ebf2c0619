"""Kubernetes: a JobSet, a TrainJob or a Volcano job, with Kueue's labels where asked."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from shipway.compiler.launch.job import Programme, slug
from shipway.compiler.launch.segments import Segment, segments
from shipway.compiler.launch.target import Command, JobState, Run, State
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import KubernetesTarget
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

PORT = 29500
RESOURCES = {"jobset": "jobset", "trainjob": "trainjob", "volcano": "job.batch.volcano.sh"}
KINDS = {"jobset": "JobSet", "trainjob": "TrainJob", "volcano": "Volcano job"}
CONFIG_MAP_LIMIT_BYTES = 1_000_000
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
_STATES: dict[str, State] = {
    "Completed": "done", "Complete": "done", "Failed": "failed", "Suspended": "waiting", "Pending": "waiting",
    "Running": "running", "Restarting": "running", "Aborted": "stopped", "Terminated": "failed",
}  # fmt: skip


class Kubernetes:
    """kubectl."""

    def render(self, programme: Programme) -> dict[str, str]:
        """The manifest for a run named after the blueprint, and the containers' first process."""
        start = fill(
            "launch/start.sh.j2",
            name=programme.name,
            plan_hash=programme.plan_hash,
            regenerate=programme.regenerate,
            meeting=_meeting_in_container(_target(programme).flavour),
        )
        return {
            f"kubernetes/{_target(programme).flavour}.yaml": manifest(programme, programme.slug),
            "start.sh": start,
        }

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """kubectl, a pinned image, stages that the controller can chain, a plan that fits a ConfigMap."""
        target = _target(programme)
        found = [] if shutil.which("kubectl") else [_no_kubectl()]
        found += image_diagnostics(target.image)
        if target.flavour != "jobset" and len(segments(programme)) > 1:
            found.append(
                Diagnostic(
                    code="LA031",
                    summary=f"a {KINDS[target.flavour]} cannot change its size between stages",
                    field="cluster.target.flavour",
                    because=tuple(
                        f"stage {stage.name} takes {stage.describe(programme.on_gpus)}"
                        for stage in programme.stages
                    ),
                    legal=("jobset",),
                    help="use flavour jobset, or pin layouts of equal size",
                )
            )
        plan = build / "plan.json"
        if plan.exists() and plan.stat().st_size > CONFIG_MAP_LIMIT_BYTES:
            found.append(
                Diagnostic(
                    code="LA032",
                    summary="the plan is too large for a ConfigMap",
                    because=(f"{plan} has {plan.stat().st_size} bytes, a ConfigMap takes a million",),
                    help="merge training stages",
                )
            )
        return found

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """The plan as a ConfigMap, then the manifest under the run's name."""
        target = _target(programme)
        name = slug(run.id)
        plan = (run.build / "plan.json").read_text()
        apply = ("kubectl", "apply", f"--namespace={target.namespace}", "--filename=-")
        return [
            Command(
                apply, "the frozen plan, to hold the image's against", stdin=config_map(programme, name, plan)
            ),
            Command(apply, f"the {KINDS[target.flavour]}", stdin=manifest(programme, name)),
        ]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """`jobset.jobset.x-k8s.io/NAME created` and its like."""
        prefixes = ("jobset.", "trainjob.", "job.batch.volcano.sh/")
        names = [line.split()[0].split("/")[1] for line in output.splitlines() if line.startswith(prefixes)]
        target = _target(programme)
        return tuple(
            Job(stage="all", id=f"{target.namespace}/{RESOURCES[target.flavour]}/{n}") for n in names
        )

    def status(self, record: RunRecord) -> list[Command]:
        """The objects as JSON, one document a job."""
        return [
            Command(
                ("kubectl", "get", f"--namespace={namespace}", f"{resource}/{name}", "--output=json"),
                "ask for the job's conditions",
            )
            for namespace, resource, name in (job.id.split("/") for job in record.jobs)
        ]

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """The newest true condition, or Volcano's phase."""
        decoder, rest, found = json.JSONDecoder(), output.strip(), []
        for job in record.jobs:
            if not rest:
                found.append(JobState(job, "unknown", "no such object"))
                continue
            value, end = decoder.raw_decode(rest)
            rest = rest[end:].strip()
            word = condition(value.get("status", {}))
            found.append(JobState(job, _STATES.get(word, "running"), word.lower()))
        return found

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """All pods of the run, each line with its pod."""
        namespace = record.jobs[0].id.split("/")[0] if record.jobs else "default"
        options = ("--prefix", "--tail=-1", "--max-log-requests=10000", *(("--follow",) if follow else ()))
        selector = f"--selector=shipway.dev/run={slug(run.id)}"
        return [
            Command(("kubectl", "logs", f"--namespace={namespace}", selector, *options), "logs of all pods")
        ]

    def cancel(self, record: RunRecord, run: Run) -> list[Command]:
        """Suspending deletes the pods with their grace period, in which they save; the object stays."""
        commands = []
        for namespace, resource, name in (job.id.split("/") for job in record.jobs):
            if resource == RESOURCES["volcano"]:
                arguments: tuple[str, ...] = (
                    "kubectl",
                    "delete",
                    f"--namespace={namespace}",
                    f"{resource}/{name}",
                )
            else:
                patch = '--patch={"spec": {"suspend": true}}'
                arguments = ("kubectl", "patch", f"--namespace={namespace}", f"{resource}/{name}")
                arguments = (*arguments, "--type=merge", patch)
            commands.append(Command(arguments, "end the pods; they save within their grace period"))
        return commands


def manifest(programme: Programme, job_name: str) -> str:
    """The manifest of a run whose objects are called `job_name`."""
    target = _target(programme)
    parts = segments(programme)
    network = programme.cluster.network
    shared = {
        "name": programme.name,
        "plan_hash": programme.plan_hash,
        "regenerate": programme.regenerate,
        "target": target,
        "kind": KINDS[target.flavour],
        "size": programme.largest.describe(programme.on_gpus),
        "job_name": job_name,
        "image": target.image or f"{programme.slug}:unset",
        "on_gpus": programme.on_gpus,
        "devices_per_node": programme.cluster.devices_per_node,
        "nics_per_node": network.nics_per_node if network else 1,
        "shared_memory": f"{target.shared_memory // 1_000_000}M",
        "save_seconds": programme.save_seconds,
        "owned_by_volcano": target.flavour == "volcano",
    }
    jobs = [
        {
            **asdict(part),
            "stage": part.stage,
            "pod": fill(
                "launch/kubernetes/pod.yaml.j2",
                **shared,
                stage=part.stage,
                meeting=meeting(target, part, job_name),
            ).rstrip(),
        }
        for part in parts
    ]
    return fill(
        f"launch/kubernetes/{target.flavour}.yaml.j2",
        **shared,
        segments=jobs,
        meeting=meeting(target, parts[0], job_name),
    )


def meeting(target: KubernetesTarget, part: Segment, job_name: str) -> list[str]:
    """Entries of `env`: where the nodes meet, the run's folder, and what the blueprint says of the site."""
    fixed = {"SHIPWAY_RUN": f"/runs/{job_name}"}
    if target.flavour == "jobset":
        fixed |= {
            "SHIPWAY_NODES": str(part.stage.nodes),
            "SHIPWAY_HEAD": f"{job_name}-{part.job}-0-0.{job_name}:{PORT}",
        }
    elif target.flavour == "volcano":
        fixed |= {
            "SHIPWAY_NODES": str(part.stage.nodes),
            "SHIPWAY_HEAD": f"{job_name}-{part.job}-0.{job_name}:{PORT}",
            "SHIPWAY_JOB": part.job,
        }
    entries = [f"- {{name: {name}, value: {json.dumps(value)}}}" for name, value in fixed.items()]
    if target.flavour != "volcano":
        entries.append(f"- name: SHIPWAY_JOB                    # counts restarts\n  {_field(_RESTARTS)}")
    entries.append(f"- name: SHIPWAY_NODE\n  {_field('spec.nodeName')}")
    return entries


def config_map(programme: Programme, job_name: str, plan: str) -> str:
    """The frozen plan as a ConfigMap."""
    value = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {
            "name": f"{job_name}-plan",
            "labels": {"shipway.dev/run": job_name},
            "annotations": {"shipway.dev/plan": programme.plan_hash},
        },
        "immutable": True,
        "data": {"plan.json": plan},
    }
    return json.dumps(value, indent=2) + "\n"


def condition(status: dict[str, object]) -> str:
    """The word for an object's status: Volcano's phase, or the newest condition that holds."""
    state = status.get("state")
    if isinstance(state, dict):
        return str(state.get("phase", "Pending"))
    conditions = status.get("conditions")
    if not isinstance(conditions, list):
        return "Pending"
    holding = [entry for entry in conditions if entry.get("status") == "True"]
    holding.sort(key=lambda entry: str(entry.get("lastTransitionTime", "")))
    return str(holding[-1]["type"]) if holding else "Running"


def image_diagnostics(image: str | None) -> list[Diagnostic]:
    """An image that is missing or not pinned."""
    if image is None:
        return [
            Diagnostic(
                code="LA033",
                summary="no container image is named",
                field="cluster.target.image",
                help="build and push container/Dockerfile of the build folder, then set cluster.target.image",
            )
        ]
    tag = image.rsplit("/", 1)[-1]
    if "@sha256:" in image or (":" in tag and not tag.endswith(":latest")):
        return []
    return [
        Diagnostic(
            code="LA034",
            summary=f"the image {image!r} is not pinned: nodes could run different ones",
            field="cluster.target.image",
            help="add a tag other than latest, or a digest",
        )
    ]


def _no_kubectl() -> Diagnostic:
    return Diagnostic(
        code="LA030",
        summary="there is no kubectl here",
        field="cluster.target.kind",
        help="install kubectl and choose the cluster's context; `--dry-run` works anywhere",
    )


def _field(path: str) -> str:
    return f'valueFrom: {{fieldRef: {{fieldPath: "{path}"}}}}'


def _meeting_in_container(flavour: str) -> str:
    if flavour != "trainjob":
        return ""
    return (
        "# The controller says where the nodes meet, for torchrun; ours must not read it twice.\n"
        "export SHIPWAY_HEAD=$PET_MASTER_ADDR:$PET_MASTER_PORT SHIPWAY_NODES=$PET_NNODES\n"
        "unset PET_MASTER_ADDR PET_MASTER_PORT PET_NNODES PET_NODE_RANK PET_NPROC_PER_NODE\n"
    )


def _target(programme: Programme) -> KubernetesTarget:
    target = programme.cluster.target
    assert isinstance(target, KubernetesTarget)
    return target
