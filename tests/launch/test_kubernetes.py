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

from shipway.compiler.launch.excluded import exclude
from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.job import slug
from shipway.compiler.launch.kubernetes import Kubernetes, condition, config_map
from shipway.compiler.launch.manifests import manifests
from shipway.compiler.launch.segments import segments
from shipway.compiler.launch.target import Run
from shipway.schemas.run import Job, RunRecord
from tests.launch import crds
from tests.launch.builds import built, jobs_of, planned
from tests.launch.targets import ALL, KUBERNETES, ON_GPUS, TWO_NODES

CORE_VERSION = "1.31"
FLAVOURS = ("jobset", "volcano", "trainjob")
SCHEMAS = {
    "JobSet": crds.JOBSET,
    "Job": crds.VOLCANO,
    "TrainJob": crds.TRAINJOB,
    "TrainingRuntime": crds.TRAINING_RUNTIME,
}
OF_SITE = "+cluster.target.runtime=torch-distributed"
GPUS = (*ON_GPUS, "cluster.target.kind=kubernetes", "+cluster.target.image=registry.example/small:1.0")
SITE = (
    "+cluster.target.queue=research",
    "+cluster.target.rdma_resource=rdma/hca",
    "+cluster.target.topology_key=topology.example/rack",
    "+cluster.target.secret=tokens",
)


def documents(*case: str, name: str = "run-1", **more: Any) -> list[dict[str, Any]]:
    """All objects of a run, in the order that they are applied."""
    texts = manifests(jobs_of(*case), name, **more).values()
    return [value for text in texts for value in yaml.safe_load_all(text)]


def parsed(*case: str, name: str = "run-1") -> dict[str, Any]:
    """The first object."""
    return documents(*case, name=name)[0]


def jobs_in(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Jobs of a JobSet or a TrainingRuntime."""
    spec = value["spec"]["template"]["spec"] if value["kind"] == "TrainingRuntime" else value["spec"]
    return [replicated["template"] for replicated in spec.get("replicatedJobs", [])]


def pod_specs(value: dict[str, Any]) -> list[dict[str, Any]]:
    """Pod templates' specs of an object that has any."""
    if value["kind"] == "Job":
        return [task["template"]["spec"] for task in value["spec"]["tasks"]]
    return [job["spec"]["template"]["spec"] for job in jobs_in(value)] if value["kind"] != "TrainJob" else []


@pytest.mark.parametrize("flavour", [*FLAVOURS, f"trainjob {OF_SITE}"])
@pytest.mark.parametrize("site", [(), SITE], ids=["plain", "site"])
def test_custom_resources_pass_their_closed_schemas(flavour: str, site: tuple[str, ...]) -> None:
    name, *more = flavour.split()
    for value in documents(*GPUS, f"+cluster.target.flavour={name}", *more, *site, exclude=("bad",)):
        jsonschema.Draft202012Validator(SCHEMAS[value["kind"]]).validate(value)


@pytest.mark.parametrize("flavour", FLAVOURS)
def test_the_schemas_are_closed(flavour: str) -> None:
    for value in documents(*GPUS, f"+cluster.target.flavour={flavour}"):
        value["spec"]["restartPolcy"] = "Never"
        assert not jsonschema.Draft202012Validator(SCHEMAS[value["kind"]]).is_valid(value)


@pytest.mark.parametrize("flavour", FLAVOURS)
@pytest.mark.parametrize("case", [("tiny", *TWO_NODES, *KUBERNETES), (*GPUS, *SITE)], ids=["cpu", "gpu"])
def test_pods_and_jobs_pass_the_core_schemas(flavour: str, case: tuple[str, ...]) -> None:
    values = documents(*case, f"+cluster.target.flavour={flavour}", exclude=("bad",))
    assert [spec for value in values for spec in pod_specs(value)]
    for value in values:
        for spec in pod_specs(value):
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
            kubernetes_validate.validate(pod, CORE_VERSION, strict=True)
        for template in jobs_in(value):
            job = {"apiVersion": "batch/v1", "kind": "Job"} | copy.deepcopy(template)
            job["metadata"] = {"name": "job"} | job.get("metadata", {})
            kubernetes_validate.validate(job, CORE_VERSION, strict=True)


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
        "SHIPWAY_LAUNCH": "1",
        "SHIPWAY_NODES": "2",
        "SHIPWAY_HEAD": "run-1-01-train-0-0.run-1-01:29500",
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


def test_a_trainjobs_own_runtime_brings_it_back_as_a_jobset_is() -> None:
    runtime, job = documents(*ALL["trainjob"])
    assert job["spec"]["runtimeRef"] == {
        "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": runtime["metadata"]["name"],
    }  # fmt: skip
    assert "runtimePatches" not in job["spec"]
    (template,) = jobs_in(runtime)
    assert template["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"] == "trainer"
    policy = runtime["spec"]["template"]["spec"]["failurePolicy"]
    assert policy == parsed(*ALL["jobset"])["spec"]["failurePolicy"]
    assert template["spec"]["podFailurePolicy"]["rules"][1]["onExitCodes"]["containerName"] == "node"


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


def test_a_fatal_code_keeps_containers_down_until_the_next_launch(tmp_path: Path) -> None:
    seen_by_node_script(launch_files(planned(*ALL["jobset"]))["launch/start.sh"], {}, tmp_path)
    fixed = {"PATH": "/usr/bin:/bin", "SHIPWAY_BUILD": str(tmp_path), "SHIPWAY_RUN": str(tmp_path / "run")}
    fixed["SHIPWAY_PYTHON"] = str(tmp_path / "python")

    def start(*words: str, launch: int = 1) -> int:
        command, given = ["bash", str(tmp_path / "start.sh"), *words], {"SHIPWAY_LAUNCH": str(launch)}
        return subprocess.run(command, env=fixed | given, check=False).returncode

    assert start("--after", "long") == 0, "the run of seen_by_node_script has finished it"
    assert start("long") == 0, "and it is not trained again"
    (tmp_path / "run" / "stages" / "long").unlink()
    (tmp_path / "launch" / "node.sh").write_text('[ "$1" = preflight ] || exit 77\n')
    assert start("long") == 77
    assert (tmp_path / "run" / "halt-1").read_text() == "77\n"
    (tmp_path / "launch" / "node.sh").write_text("exit 0\n")
    assert start("long") == 77
    assert start("--after", "other") == 77, "whoever waits for it is let go"
    assert start("long", launch=2) == 0


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


def test_topology_is_kueues_business_where_there_is_a_queue() -> None:
    """Its annotation on the pods, at most one of a kind; JobSet's exclusive placement elsewhere."""
    rack = "+cluster.target.topology_key=topology.example/rack"
    alone, queued = parsed(*GPUS, rack), parsed(*GPUS, rack, "+cluster.target.queue=research")
    exclusive = "alpha.jobset.sigs.k8s.io/exclusive-topology"
    assert alone["metadata"]["annotations"][exclusive] == "topology.example/rack"
    assert exclusive not in queued["metadata"]["annotations"]
    of_pods = [job["spec"]["template"]["metadata"].get("annotations") for job in jobs_in(queued)]
    assert of_pods == [{"kueue.x-k8s.io/podset-preferred-topology": "topology.example/rack"}]
    assert "annotations" not in jobs_in(alone)[0]["spec"]["template"]["metadata"]


def test_stages_are_jobsets_of_their_own_each_after_the_one_before() -> None:
    first, second = documents(*ALL["jobset"])
    assert [value["metadata"]["name"] for value in (first, second)] == ["run-1-01", "run-1-02"]
    assert [value["metadata"]["labels"]["shipway.dev/stage"] for value in (first, second)] == [
        "short",
        "long",
    ]
    assert {value["metadata"]["labels"]["shipway.dev/run"] for value in (first, second)} == {"run-1"}
    assert [job["name"] for job in first["spec"]["replicatedJobs"]] == ["train"]
    wait, train = second["spec"]["replicatedJobs"]
    assert train["dependsOn"] == [{"name": wait["name"], "status": "Complete"}]
    (container,) = wait["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"][-2:] == ["--after", "short"]
    assert container["resources"] == {"requests": {"cpu": "100m", "memory": "64Mi"}}, "no devices"


def test_stages_of_one_size_are_one_trainjob_and_of_others_refused(tmp_path: Path) -> None:
    for case in (ALL["trainjob"], ALL["volcano"]):
        jobs = jobs_of(*case)
        assert [part.job for part in segments(jobs)] == ["train"]
        odd = replace(jobs, stages=(replace(jobs.stages[0], nodes=1), *jobs.stages[1:]))
        assert "LA031" in [found.code for found in Kubernetes().check(odd, tmp_path)]


def test_excluded_nodes_are_kept_out_of_the_pods(tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    exclude(tmp_path / "r", ["gpu-7"])
    run = Run(tmp_path / "r", built(tmp_path / "build", *ALL["jobset"]), launch=2)
    old, _, job = Kubernetes().submit(jobs_of(*ALL["jobset"]), run)
    # Applied again, what has ended would stay as it is.
    assert old.arguments[:4] == ("kubectl", "delete", "--namespace=default", "jobset")
    for value in yaml.safe_load_all(job.stdin):
        spec = pod_specs(value)[-1]
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        (expression,) = required["nodeSelectorTerms"][0]["matchExpressions"]
        assert expression == {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": ["gpu-7"]}


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
    names = [value["metadata"]["name"] for value in yaml.safe_load_all(job.stdin)]
    assert names == ["tiny-20261130-101112-01", "tiny-20261130-101112-02"]
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
    (state,) = Kubernetes().states(
        record, json.dumps({"metadata": {"name": "r"}, "status": {"conditions": [done]}})
    )
    assert state.state == "done"
    (gone,) = Kubernetes().states(record, "")
    assert (gone.state, gone.detail) == ("unknown", "no such object")


def test_a_long_runs_name_keeps_its_time() -> None:
    long = "a-very-long-name-of-a-blueprint-with-everything"
    names = {slug(f"{long}-20261130-10111{second}") for second in (2, 3)}
    assert names == {"a-very-long-name-of-a-bl-20261130-101112", "a-very-long-name-of-a-bl-20261130-101113"}
    assert len(names.pop()) <= 40
