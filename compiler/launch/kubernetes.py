"""Kubernetes: a JobSet, a TrainJob or a Volcano job, with Kueue's labels where asked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from shipway.compiler.launch.excluded import read_excluded
from shipway.compiler.launch.job import Programme, slug
from shipway.compiler.launch.manifests import KINDS, manifests
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.target import Command, JobState, Run, State
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import KubernetesTarget
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

RESOURCES = {"jobset": "jobset", "trainjob": "trainjob", "volcano": "job.batch.volcano.sh"}
PLURALS = {
    "jobset": "jobsets.jobset.x-k8s.io",
    "trainjob": "trainjobs.trainer.kubeflow.org",
    "volcano": "jobs.batch.volcano.sh",
}
OWNED = {"jobset": "jobset", "trainjob": "trainjob,trainingruntime", "volcano": "job.batch.volcano.sh"}
"""Kinds of the objects that a launch makes."""
CONFIG_MAP_LIMIT_BYTES = 1_000_000
_STATES: dict[str, State] = {
    "Completed": "done", "Complete": "done", "Failed": "failed", "Suspended": "waiting", "Pending": "waiting",
    "Running": "running", "Restarting": "running", "Aborted": "stopped", "Terminated": "failed",
}  # fmt: skip


class Kubernetes:
    """kubectl."""

    def render(self, programme: Programme) -> dict[str, str]:
        """Manifests for a run named after the blueprint, and the containers' first process."""
        start = fill(
            "launch/start.sh.j2",
            name=programme.name,
            plan_hash=programme.plan_hash,
            regenerate=programme.regenerate,
            meeting=_meeting_in_container(_target(programme).flavour),
        )
        texts = manifests(programme, programme.slug)
        return {**{f"kubernetes/{name}": text for name, text in texts.items()}, "start.sh": start}

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

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Whether the controller is installed, jobs may be made, and the run's volume is there."""
        target = _target(programme)
        where, resource = f"--namespace={target.namespace}", PLURALS[target.flavour]
        return [
            Command(("kubectl", "get", "crd", resource, "--output=name"), f"{resource} are known"),
            Command(("kubectl", "auth", "can-i", "create", resource, where), f"{resource} may be made"),
            Command(("kubectl", "get", "pvc", target.checkpoint_claim, where), "the volume of runs is there"),
        ]

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """The plan as a ConfigMap, then the manifests under the run's name.

        Of a run that is resumed the old objects go first: applied again, they would stay as they ended.
        """
        target = _target(programme)
        name = slug(run.id)
        plan = (run.build / "plan.json").read_text()
        apply = ("kubectl", "apply", f"--namespace={target.namespace}", "--filename=-")
        texts = manifests(programme, name, launch=run.launch, exclude=read_excluded(run.folder))
        text = "---\n".join(texts.values())
        commands = [
            Command(
                apply, "the frozen plan, to hold the image's against", stdin=config_map(programme, name, plan)
            ),
            Command(apply, f"the {KINDS[target.flavour]}", stdin=text),
        ]
        if run.launch == 1:
            return commands
        old = ("kubectl", "delete", f"--namespace={target.namespace}", OWNED[target.flavour])
        selected = (*old, f"--selector=shipway.dev/run={name}", "--ignore-not-found", "--wait=true")
        return [Command(selected, "what the launch before left"), *commands]

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """`jobset.jobset.x-k8s.io/NAME created` and its like."""
        target = _target(programme)
        prefixes = ("jobset.", "trainjob.", "job.batch.volcano.sh/")
        names = [line.split()[0].split("/")[1] for line in output.splitlines() if line.startswith(prefixes)]
        stages = {f"{stage.number:02d}": stage.name for stage in programme.stages}
        per_stage = target.flavour == "jobset"
        return tuple(
            Job(
                stage=stages.get(name[-2:], "all") if per_stage else "all",
                id=f"{target.namespace}/{RESOURCES[target.flavour]}/{name}",
            )
            for name in names
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
        """The newest true condition, or Volcano's phase; an object that is gone has none."""
        words = {value["metadata"]["name"]: condition(value.get("status", {})) for value in documents(output)}
        found = []
        for job in record.jobs:
            word = words.get(job.id.split("/")[-1])
            state = _STATES.get(word, "running") if word else "unknown"
            found.append(JobState(job, state, word.lower() if word else "no such object"))
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
        """Deleting ends the pods with their grace period, in which they save.

        Suspending would not hold where Kueue owns that field. Later stages go first.
        """
        return [
            Command(
                (
                    "kubectl", "delete", f"--namespace={namespace}", f"{resource}/{name}",
                    "--ignore-not-found", "--wait=false",
                ),
                "end the pods; they save within their grace period",
            )
            for namespace, resource, name in (job.id.split("/") for job in reversed(record.jobs))
        ]  # fmt: skip

    def accusations(self, record: RunRecord) -> list[Command]:
        """The pods as JSON: of one that left with 4 the termination message names the bad nodes."""
        namespaces = {job.id.split("/")[0] for job in record.jobs}
        selector = f"--selector=shipway.dev/run={slug(record.id)}"
        return [
            Command(
                ("kubectl", "get", "pods", f"--namespace={namespace}", selector, "--output=json"),
                "ask which nodes failed the pre-flight",
            )
            for namespace in sorted(namespaces)
        ]

    def accused(self, output: str) -> tuple[str, ...]:
        """Nodes after `exclude:` in the messages of pods that left with 4."""
        pods = [pod for answer in documents(output) for pod in answer.get("items", [])]
        messages = [
            str(ended.get("message", ""))
            for pod in pods
            for container in pod.get("status", {}).get("containerStatuses", [])
            if (ended := container.get("state", {}).get("terminated", {})).get("exitCode") == 4
        ]
        lines = [line for message in messages for line in message.splitlines()]
        named = [line.removeprefix("exclude:").split() for line in lines if line.startswith("exclude:")]
        return tuple(sorted({node for nodes in named for node in nodes}))

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """They can be left out: a node affinity of the pods."""
        return None


def documents(text: str) -> Iterator[dict[str, Any]]:
    """JSON objects one after another, as several commands print them."""
    decoder, rest = json.JSONDecoder(), text.strip()
    while rest:
        value, end = decoder.raw_decode(rest)
        rest = rest[end:].strip()
        yield value


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
