"""Manifests pass strict schemas, and say to each pod what it needs to find the others."""

from __future__ import annotations

import copy
import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.kubernetes import Kubernetes, condition, config_map, manifest
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.target import Run
from shipway.schemas.run import Job, RunRecord
from tests.launch import crds
from tests.launch.builds import built, jobs_of, planned
from tests.launch.targets import ALL, KUBERNETES, ON_GPUS, TWO_NODES

CORE_VERSION = "1.31"
SCHEMAS = {"jobset": crds.JOBSET, "volcano": crds.VOLCANO, "trainjob": crds.TRAINJOB}
GPUS = (*ON_GPUS, "cluster.target.kind=kubernetes", "+cluster.target.image=registry.example/small:1.0")
SITE = (
    "+cluster.target.queue=research",
    "+cluster.target.rdma_resource=rdma/hca",
    "+cluster.target.topology_key=topology.example/rack",
    "+cluster.target.secret=tokens",
)


def parsed(*case: str, name: str = "run-1") -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load(manifest(jobs_of(*case), name))
    return value


def pod_specs(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates' specs in a JobSet or a Volcano job."""
    if value["kind"] == "JobSet":
        return [job["template"]["spec"]["template"]["spec"] for job in value["spec"]["replicatedJobs"]]
    return [task["template"]["spec"] for task in value["spec"]["tasks"]]


@pytest.mark.parametrize("flavour", SCHEMAS)
@pytest.mark.parametrize("site", [(), SITE], ids=["plain", "site"])
def test_custom_resources_pass_their_closed_schemas(flavour: str, site: tuple[str, ...]) -> None:
    value = parsed(*GPUS, f"+cluster.target.flavour={flavour}", *site)
    jsonschema.Draft202012Validator(SCHEMAS[flavour]).validate(value)


@pytest.mark.parametrize("flavour", SCHEMAS)
def test_the_schemas_are_closed(flavour: str) -> None:
    value = parsed(*GPUS, f"+cluster.target.flavour={flavour}")
    value["spec"]["restartPolcy"] = "Never"
    assert not jsonschema.Draft202012Validator(SCHEMAS[flavour]).is_valid(value)


@pytest.mark.parametrize("flavour", ["jobset", "volcano"])
@pytest.mark.parametrize("case", [("tiny", *TWO_NODES, *KUBERNETES), (*GPUS, *SITE)], ids=["cpu", "gpu"])
def test_pods_and_jobs_pass_the_core_schemas(flavour: str, case: tuple[str, ...]) -> None:
    value = parsed(*case, f"+cluster.target.flavour={flavour}")
    for spec in pod_specs(value):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        kubernetes_validate.validate(pod, CORE_VERSION, strict=True)
    for replicated in value["spec"].get("replicatedJobs", []):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}}
        kubernetes_validate.validate(job | copy.deepcopy(replicated["template"]), CORE_VERSION, strict=True)


def test_the_frozen_plan_is_a_config_map_with_its_hash() -> None:
    jobs, plan = jobs_of(*GPUS), planned(*GPUS)
    value = json.loads(config_map(jobs, "run-1", "{}\n"))
    kubernetes_validate.validate(value, CORE_VERSION, strict=True)
    assert value["metadata"]["annotations"]["shipway.dev/plan"] == plan.hash
    assert value["metadata"]["name"] == pod_specs(parsed(*GPUS))[0]["volumes"][2]["configMap"]["name"]


def environment(spec: dict[str, Any], pod: dict[str, str]) -> dict[str, str]:
    """What a container of the pod would see, with the pod's own fields filled in."""
    (container,) = spec["containers"]
    return {
        entry["name"]: entry["value"]
        if "value" in entry
        else pod[entry["valueFrom"]["fieldRef"]["fieldPath"]]
        for entry in container["env"]
    }


def test_each_pod_of_a_jobset_finds_the_first() -> None:
    value = parsed("tiny", *TWO_NODES, *KUBERNETES, name="run-1")
    (spec,) = pod_specs(value)
    fields = {"metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "3", "spec.nodeName": "node-a"}
    assert environment(spec, fields) == {
        "SHIPWAY_RUN": "/runs/run-1",
        "SHIPWAY_NODES": "2",
        "SHIPWAY_HEAD": "run-1-train-0-0.run-1:29500",
        "SHIPWAY_JOB": "3",
        "SHIPWAY_NODE": "node-a",
    }
    job = value["spec"]["replicatedJobs"][0]
    assert job["name"] == "train"
    assert job["template"]["spec"]["parallelism"] == job["template"]["spec"]["completions"] == 2


def test_each_pod_of_a_volcano_job_finds_the_first() -> None:
    (spec,) = pod_specs(
        parsed("tiny", *TWO_NODES, *KUBERNETES, "+cluster.target.flavour=volcano", name="run-1")
    )
    seen = environment(spec, {"spec.nodeName": "node-a"})
    assert seen["SHIPWAY_HEAD"] == "run-1-train-0.run-1:29500"
    assert seen["SHIPWAY_NODES"] == "2"


def seen_by_node_script(start: str, given: dict[str, str], folder: Path) -> dict[str, str]:
    """Run a container's first process with stand-ins for what it calls; returns node.sh's environment."""
    (folder / "launch").mkdir(parents=True)
    (folder / "launch" / "node.sh").write_text("env > seen.txt\n")
    (folder / "python").write_text("#!/bin/sh\nexit 0\n")
    (folder / "python").chmod(0o755)
    (folder / "start.sh").write_text(start)
    fixed = {"PATH": "/usr/bin:/bin", "SHIPWAY_BUILD": str(folder), "SHIPWAY_PYTHON": str(folder / "python")}
    fixed["SHIPWAY_RUN"] = str(folder / "run")
    subprocess.run(["bash", "start.sh", "long"], cwd=folder, env=fixed | given, check=True)
    return dict(line.split("=", 1) for line in (folder / "seen.txt").read_text().splitlines() if "=" in line)


def test_a_trainjobs_pod_takes_the_controllers_word_and_hides_it(tmp_path: Path) -> None:
    given = {"PET_MASTER_ADDR": "run-1-node-0-0.run-1", "PET_MASTER_PORT": "29400", "PET_NNODES": "2"}
    given |= {"PET_NODE_RANK": "1", "PET_NPROC_PER_NODE": "1", "SHIPWAY_JOB": "0"}
    start = launch_files(planned(*ALL["trainjob"]))["launch/start.sh"]
    seen = seen_by_node_script(start, given, tmp_path)
    assert seen["SHIPWAY_HEAD"] == "run-1-node-0-0.run-1:29400"
    assert seen["SHIPWAY_NODES"] == "2"
    assert not [name for name in seen if name.startswith("PET_")]


def test_an_aihc_pod_reads_rank_and_world_size_as_nodes(tmp_path: Path) -> None:
    given = {"MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456", "RANK": "1", "WORLD_SIZE": "2"}
    given |= {"NPROC_PER_NODE": "8", "AIHC_JOB_NAME": "run-1"}
    seen = seen_by_node_script(launch_files(planned(*ALL["aihc"]))["launch/start.sh"], given, tmp_path)
    assert seen["SHIPWAY_HEAD"] == "job-master-0:23456"
    assert seen["SHIPWAY_NODES"] == "2"
    assert seen["SHIPWAY_JOB"] == "run-1"
    assert not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} & set(seen)


def test_a_fatal_code_keeps_containers_from_starting_again(tmp_path: Path) -> None:
    seen_by_node_script(launch_files(planned(*ALL["jobset"]))["launch/start.sh"], {}, tmp_path)
    (tmp_path / "launch" / "node.sh").write_text('[ "$1" = preflight ] || exit 77\n')
    fixed = {"PATH": "/usr/bin:/bin", "SHIPWAY_BUILD": str(tmp_path), "SHIPWAY_RUN": str(tmp_path / "run")}
    fixed["SHIPWAY_PYTHON"] = str(tmp_path / "python")
    start = ["bash", str(tmp_path / "start.sh"), "long"]
    assert subprocess.run(start, env=fixed, check=False).returncode == 77
    assert (tmp_path / "run" / "halt").read_text() == "77\n"
    (tmp_path / "launch" / "node.sh").write_text("exit 0\n")
    assert subprocess.run(start, env=fixed, check=False).returncode == 77


def test_disruptions_restart_uncounted_and_fatal_codes_fail_the_set() -> None:
    policy = parsed(*ALL["jobset"])["spec"]["failurePolicy"]
    assert [rule["action"] for rule in policy["rules"]] == ["RestartJobSetAndIgnoreMaxRestarts", "FailJobSet"]
    job = parsed(*ALL["jobset"])["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["backoffLimit"] == 0
    disruption, codes = job["podFailurePolicy"]["rules"]
    assert disruption["onPodConditions"][0]["type"] == "DisruptionTarget"
    assert codes["onExitCodes"]["values"] == [4, 77, 78]


def test_the_grace_period_is_no_shorter_than_a_save() -> None:
    (spec,) = pod_specs(parsed(*GPUS))
    assert spec["terminationGracePeriodSeconds"] >= jobs_of(*GPUS).save_seconds


def test_kueue_admits_a_job_that_starts_suspended() -> None:
    value = parsed(*GPUS, "+cluster.target.queue=research")
    assert value["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "research"
    assert value["spec"]["suspend"] is True
    assert "suspend" not in parsed(*GPUS)["spec"]


def test_stages_of_one_size_are_one_job_and_of_others_a_chain() -> None:
    jobs = jobs_of(*ALL["jobset"])
    assert [part.job for part in segments(jobs)] == ["train"]
    smaller = replace(jobs.stages[0], nodes=1)
    value = yaml.safe_load(manifest(replace(jobs, stages=(smaller, *jobs.stages[1:])), "run-1"))
    first, second = value["spec"]["replicatedJobs"]
    assert second["dependsOn"] == [{"name": first["name"], "status": "Complete"}]
    jsonschema.Draft202012Validator(crds.JOBSET).validate(value)


@pytest.mark.parametrize(
    ("image", "code"),
    [
        ("registry.example/small", "LA034"),
        ("registry.example:5000/small", "LA034"),
        ("registry.example/small:latest", "LA034"),
    ],
)
def test_an_image_that_is_not_pinned_is_refused(image: str, code: str) -> None:
    case = (*ON_GPUS, "cluster.target.kind=kubernetes", f"+cluster.target.image='{image}'")
    assert code in [found.code for found in Kubernetes().check(jobs_of(*case), Path("build"))]


def test_submitting_applies_the_plan_and_then_the_manifest(tmp_path: Path) -> None:
    build = built(tmp_path / "build", *ALL["jobset"])
    run = Run(tmp_path / "runs" / "tiny-20261130-101112", build)
    plan, job = Kubernetes().submit(jobs_of(*ALL["jobset"]), run)
    assert json.loads(plan.stdin)["data"]["plan.json"] == (build / "plan.json").read_text()
    assert yaml.safe_load(job.stdin)["metadata"]["name"] == "tiny-20261130-101112"
    assert plan.arguments == ("kubectl", "apply", "--namespace=default", "--filename=-")


def test_states_are_read_from_conditions() -> None:
    assert condition({}) == "Pending"
    assert condition({"conditions": []}) == "Running"
    done = {"type": "Completed", "status": "True", "lastTransitionTime": "2026-01-02T00:00:00Z"}
    started = {
        "type": "StartupPolicyCompleted",
        "status": "True",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    assert condition({"conditions": [done, started]}) == "Completed"
    record = RunRecord(
        id="r", name="tiny", plan_hash="h", target="kubernetes", build="/b", launched_at="t",
        jobs=(Job(stage="all", id="default/jobset/r"),),
    )  # fmt: skip
    (state,) = Kubernetes().states(record, json.dumps({"status": {"conditions": [done]}}))
    assert state.state == "done"
