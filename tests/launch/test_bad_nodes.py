"""A node that fails its pre-flight in a container: how its name reaches whoever submits the next job."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.launch import record
from shipway.compiler.launch.attend import attend
from shipway.compiler.launch.excluded import read_excluded
from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.kubernetes import Kubernetes
from shipway.compiler.launch.launch import Launch, prepare, start
from shipway.compiler.launch.manifests import manifests
from shipway.compiler.launch.runs import RunStatus
from shipway.schemas.run import RunRecord
from tests.launch.builds import built, jobs_of, planned
from tests.launch.stand_ins import calls, first_in_path, program
from tests.launch.targets import ALL, KUBERNETES, TWO_NODES


def first_process(folder: Path, node: str, *, verdict: int = 0, fabric: int = 0, slow: str = "") -> int:
    """Run start.sh on a node whose checks leave with these codes; returns what it leaves with."""
    (folder / "launch").mkdir(parents=True, exist_ok=True)
    (folder / "start.sh").write_text(launch_files(planned(*ALL["jobset"]))["launch/start.sh"])
    writes = f'printf "{slow}" > "$SHIPWAY_RUN/preflight/exclude"'
    (folder / "launch/node.sh").write_text(f"[ $1 = preflight ] || exit 0\n{writes}\nexit {fabric}\n")
    (folder / "run/preflight").mkdir(parents=True, exist_ok=True)
    python = program(folder / "bin", "python", f'[[ "$*" != *" verdict "* ]] || exit {verdict}')
    given = {"PATH": os.environ["PATH"], "SHIPWAY_BUILD": str(folder), "SHIPWAY_RUN": str(folder / "run")}
    given |= {"SHIPWAY_PYTHON": str(python), "SHIPWAY_NODE": node}
    given |= {"SHIPWAY_TERMINATION_LOG": str(folder / f"{node}.message")}
    return subprocess.run(["bash", str(folder / "start.sh"), "long"], env=given, check=False).returncode


def test_a_pod_names_its_bad_node_as_its_last_message(tmp_path: Path) -> None:
    assert first_process(tmp_path, "gpu-7", verdict=4) == 4
    assert (tmp_path / "gpu-7.message").read_text() == "exclude: gpu-7\n"
    assert (tmp_path / "run/halt-1").read_text() == "4\n", (
        "no restart meets it again, and the next stage is let go"
    )


def test_pods_name_the_nodes_of_slow_groups_and_those_known_before(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run/exclude-1").write_text("gpu-7\n")
    assert first_process(tmp_path, "gpu-1", fabric=4, slow="gpu-3\ngpu-9\n") == 4
    assert (tmp_path / "gpu-1.message").read_text() == "exclude: gpu-3 gpu-7 gpu-9\n"


def test_other_failures_blame_no_node(tmp_path: Path) -> None:
    assert first_process(tmp_path, "gpu-1", fabric=1) == 1
    assert not (tmp_path / "gpu-1.message").exists()
    assert not (tmp_path / "run/halt-1").exists()


def pod(code: int, message: str) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "message": message}}
    return {"status": {"containerStatuses": [{"name": "trainer", "state": ended}]}}


def test_only_pods_that_left_with_the_code_of_the_pre_flight_accuse() -> None:
    pods = [pod(4, "exclude: b a\n"), pod(4, "the image holds another plan"), pod(1, "exclude: c\n")]
    waiting = {"status": {"containerStatuses": [{"name": "trainer", "state": {"waiting": {}}}]}}
    answer = json.dumps({"items": [*pods, waiting, {"status": {}}]})
    assert Kubernetes().accused(answer) == ("a", "b")
    assert Kubernetes().accused("") == ()


CLUSTER = """
bin=$(dirname "$0")
case "$1 $2" in
  "apply "*) text=$(cat); [[ $text == *JobSet* ]] || exit 0
    echo "$text" > "$bin/applied"
    printf 'jobset.jobset.x-k8s.io/%s created\n' r-01 r-02 ;;
  "get pods") grep -q NotIn "$bin/applied" || cat "$bin/pods" ;;
  "get "*) grep -q NotIn "$bin/applied" && word=Completed || word=Failed
    condition='{"type": "'$word'", "status": "True"}'
    echo '{"metadata": {"name": "'"${3##*/}"'"}, "status": {"conditions": ['"$condition"']}}' ;;
esac
"""
"""A kubectl whose jobs fail for the pods' reason, until some node is left out; then they are done."""


@pytest.fixture
def failed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launch:
    """A run `r` that a bad node has ended."""
    program(tmp_path / "bin", "kubectl", CLUSTER)
    (tmp_path / "bin/pods").write_text(json.dumps({"items": [pod(4, "exclude: gpu-7\n")]}))
    first_in_path(tmp_path / "bin", monkeypatch)
    ready = prepare(built(tmp_path / "build", *ALL["jobset"]), tmp_path / "runs", run_id="r")
    assert isinstance(ready, Launch)
    start(ready)
    return ready


def nodes_left_out(applied: Path) -> list[list[str]]:
    """Nodes that each stage's pods stay off."""
    found = []
    for value in yaml.safe_load_all(applied.read_text()):
        spec = value["spec"]["replicatedJobs"][-1]["template"]["spec"]["template"]["spec"]
        required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        found.append(required["nodeSelectorTerms"][0]["matchExpressions"][0]["values"])
    return found


def test_resume_stays_off_a_bad_node_unasked(
    failed: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = str(tmp_path / "runs")
    assert shipway(["status", "r", "--runs", runs, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["state"], told["bad_nodes"]) == ("failed", ["gpu-7"])
    assert "`shipway resume` goes on without" in told["detail"]
    assert shipway(["resume", "r", "--runs", runs, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left_out"] == ["gpu-7"]
    assert read_excluded(failed.run.folder) == ("gpu-7",)
    assert nodes_left_out(tmp_path / "bin/applied") == [["gpu-7"], ["gpu-7"]]


def test_a_client_that_waits_brings_the_run_back(failed: Launch, tmp_path: Path) -> None:
    said: list[str] = []
    ended = attend(failed, said.append, pause_seconds=0.0)
    assert isinstance(ended, RunStatus)
    assert ended.state == "done"
    assert said[0].startswith("without gpu-7")
    assert nodes_left_out(tmp_path / "bin/applied") == [["gpu-7"], ["gpu-7"]]


def test_a_run_that_the_cluster_has_finished_is_not_continued(
    failed: Launch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its attempts are on the cluster's volume, so this folder alone cannot tell."""
    arguments = ["launch", str(tmp_path / "build"), "--runs", str(tmp_path / "runs"), "--json"]
    assert shipway(arguments) == 0
    assert json.loads(capsys.readouterr().out)["continues"] is True
    assert shipway(arguments) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["continues"], told["run"] == "r") == (False, False)


def test_a_client_that_waits_does_not_try_the_same_again(failed: Launch, tmp_path: Path) -> None:
    """The scheduler knows the node by another name, say: nothing new can be left out."""
    (failed.run.folder / "exclude").write_text("gpu-7\n")
    before = len(calls(tmp_path / "bin", "kubectl"))
    ended = attend(failed, print, pause_seconds=0.0)
    assert isinstance(ended, RunStatus)
    assert (ended.state, ended.bad_nodes) == ("failed", ("gpu-7",))
    assert not [call for call in calls(tmp_path / "bin", "kubectl")[before:] if call.startswith("apply")]


def test_a_sites_own_runtime_is_patched_to_stay_off() -> None:
    case = (
        "tiny",
        *TWO_NODES,
        *KUBERNETES,
        "+cluster.target.flavour=trainjob",
        "+cluster.target.runtime=torch",
    )
    (text,) = manifests(jobs_of(*case), "r", exclude=("gpu-7",)).values()
    (patch,) = yaml.safe_load(text)["spec"]["runtimePatches"]
    (job,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    template = job["template"]["spec"]["template"]
    assert "gpu-7" in json.dumps(template["spec"]["affinity"])
    assert template["metadata"]["labels"] == {"shipway.dev/run": "r"}, "by which its pods are asked"


def test_this_machine_cannot_be_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = prepare(built(tmp_path / "b", "tiny"), tmp_path / "runs", run_id="r")
    assert isinstance(ready, Launch)
    entry = RunRecord(
        id="r", name="tiny", plan_hash=ready.plan.hash, target="local", build=str(tmp_path / "b"),
        launched_at=record.now(),
    )  # fmt: skip
    record.write_record(tmp_path / "runs/r", entry)
    assert shipway(["resume", "r", "--exclude", "here", "--runs", str(tmp_path / "runs"), "--json"]) == 4
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "LA023"
    assert not (tmp_path / "runs/r/exclude").exists()
