"""Kubernetes manifests: a JobSet per stage, or one TrainJob or Volcano job for all stages."""

from __future__ import annotations

import json
from collections.abc import Sequence

from shipway.compiler.launch.job import Programme, StageJob
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.templates import fill
from shipway.schemas.cluster import KubernetesTarget

PORT = 29500
KINDS = {"jobset": "JobSet", "trainjob": "TrainJob", "volcano": "Volcano job"}
_RESTARTS = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"


def manifests(
    programme: Programme, run_name: str, *, launch: int = 1, exclude: Sequence[str] = ()
) -> dict[str, str]:
    """Manifests by file name, in the order that they are applied; `exclude` names nodes to stay off."""
    target = programme.cluster.target
    assert isinstance(target, KubernetesTarget)
    if target.flavour == "jobset":
        return {
            f"{stage.slug}.yaml": _jobset(programme, target, stage, run_name, launch, exclude)
            for stage in programme.stages
        }
    stage = segments(programme)[0].stage
    values = _shared(programme, target, stage, run_name, run_name, launch, exclude)
    return {f"{target.flavour}.yaml": fill(f"launch/kubernetes/{target.flavour}.yaml.j2", **values)}


def _jobset(
    programme: Programme,
    target: KubernetesTarget,
    stage: StageJob,
    run_name: str,
    launch: int,
    exclude: Sequence[str],
) -> str:
    values = _shared(programme, target, stage, f"{run_name}-{stage.number:02d}", run_name, launch, exclude)
    before = next((other.name for other in programme.stages if other.number == stage.number - 1), "")
    waiting = _entries(_of_run(run_name, launch))
    return fill("launch/kubernetes/jobset.yaml.j2", **values, before=before, waiting=waiting)


def _shared(
    programme: Programme,
    target: KubernetesTarget,
    stage: StageJob,
    job_name: str,
    run_name: str,
    launch: int,
    exclude: Sequence[str],
) -> dict[str, object]:
    network = programme.cluster.network
    values: dict[str, object] = {
        "name": programme.name,
        "plan_hash": programme.plan_hash,
        "regenerate": programme.regenerate,
        "target": target,
        "kind": KINDS[target.flavour],
        "stage": stage,
        "size": stage.describe(programme.on_gpus),
        "job_name": job_name,
        "run_name": run_name,
        "image": target.image or f"{programme.slug}:unset",
        "container": "node" if target.flavour == "trainjob" else "trainer",
        "on_gpus": programme.on_gpus,
        "devices_per_node": programme.cluster.devices_per_node,
        "nics_per_node": network.nics_per_node if network else 1,
        "shared_memory": f"{target.shared_memory // 1_000_000}M",
        "save_seconds": programme.save_seconds,
        "owned_by_volcano": target.flavour == "volcano",
        "affinity": fill("launch/kubernetes/affinity.j2", exclude=exclude).rstrip() if exclude else "",
        "meeting": meeting(target, stage, job_name, run_name, launch),
    }
    values["pod"] = fill("launch/kubernetes/pod.yaml.j2", **values).rstrip()
    values["failure_policy"] = fill("launch/kubernetes/failure_policy.j2", **values).rstrip()
    values["job"] = fill("launch/kubernetes/job.j2", **values).rstrip()
    return values


def meeting(
    target: KubernetesTarget, stage: StageJob, job_name: str, run_name: str, launch: int
) -> list[str]:
    """Entries of `env`: the run's folder, where the nodes meet, and which start this is."""
    fixed = _of_run(run_name, launch)
    if target.flavour == "jobset":
        fixed |= {
            "SHIPWAY_NODES": str(stage.nodes),
            "SHIPWAY_HEAD": f"{job_name}-train-0-0.{job_name}:{PORT}",
        }
    elif target.flavour == "volcano":
        fixed |= {
            "SHIPWAY_NODES": str(stage.nodes),
            "SHIPWAY_HEAD": f"{job_name}-train-0.{job_name}:{PORT}",
            "SHIPWAY_JOB": "train",
        }
    entries = _entries(fixed)
    if target.flavour != "volcano":
        entries.append(f"- name: SHIPWAY_JOB                    # counts restarts\n  {_field(_RESTARTS)}")
    entries.append(f"- name: SHIPWAY_NODE\n  {_field('spec.nodeName')}")
    return entries


def _of_run(run_name: str, launch: int) -> dict[str, str]:
    return {"SHIPWAY_RUN": f"/runs/{run_name}", "SHIPWAY_LAUNCH": str(launch)}


def _entries(fixed: dict[str, str]) -> list[str]:
    return [f"- {{name: {name}, value: {json.dumps(value)}}}" for name, value in fixed.items()]


def _field(path: str) -> str:
    return f'valueFrom: {{fieldRef: {{fieldPath: "{path}"}}}}'
