"""What stops a launch before anything is spent, each case with its exit code: 4 environment, 5 stale plan."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.emit.build import BuildFolder
from shipway.compiler.emit.build import build as write_build
from shipway.compiler.launch import record
from shipway.compiler.launch.files import launch_files
from shipway.compiler.launch.launch import Refusal
from shipway.compiler.launch.probes import probe
from shipway.runtime.preflight.__main__ import main as preflight
from shipway.schemas.run import RunRecord
from tests.launch.builds import TWO_NODES, jobs_of, planned
from tests.launch.stand_ins import alone_in_path, calls, first_in_path, program
from tests.launch.targets import ALL, KUBERNETES, ON_GPUS, SLURM, SSH

ONE_H100_NODE = ("small_h200", "cluster=h100_8")
H100 = "NVIDIA H100 80GB HBM3"


def refused(
    capsys: pytest.CaptureFixture[str], runs: Path, *case: str, command: str = "launch"
) -> tuple[int, list[str]]:
    """Exit code and diagnostics of a launch; nothing may have been started."""
    build = runs.parent / "b"
    if not build.exists():
        assert isinstance(write_build(planned(*case), build), BuildFolder)
    code = shipway([command, str(build), "--runs", str(runs), "--json"])
    assert not runs.exists(), "nothing was started"
    return code, [found["code"] for found in json.loads(capsys.readouterr().out)["diagnostics"]]


@pytest.mark.parametrize(
    ("names", "code"),
    [([], "LA021"), ([H100] * 7, "LA021"), (["NVIDIA A100-SXM4-80GB"] * 8, "LA022")],
    ids=["no driver", "a device too few", "another device"],
)
def test_devices_of_this_machine_that_are_not_the_plans(
    names: list[str],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if names:
        program(tmp_path / "bin", "nvidia-smi", f"cat <<'EOF'\n{chr(10).join(names)}\nEOF")
        first_in_path(tmp_path / "bin", monkeypatch)
    else:
        alone_in_path(tmp_path / "bin", monkeypatch)
    assert refused(capsys, tmp_path / "runs", *ONE_H100_NODE) == (4, [code])


def test_devices_that_are_the_plans_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from shipway.compiler.launch.local import Local

    program(tmp_path / "bin", "nvidia-smi", f"for i in 1 2 3 4 5 6 7 8; do echo '{H100}'; done")
    first_in_path(tmp_path / "bin", monkeypatch)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    jobs = jobs_of(*ONE_H100_NODE)
    assert Local().check(jobs, tmp_path) == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert [found.code for found in Local().check(jobs, tmp_path)] == ["LA021"]


@pytest.mark.parametrize(
    ("case", "code"),
    [
        (("tiny", *TWO_NODES, *SLURM), "LA010"),
        (("tiny", *TWO_NODES, *KUBERNETES), "LA030"),
        (("tiny", *TWO_NODES, *SSH), "LA040"),
    ],
    ids=["sbatch", "kubectl", "ssh"],
)
def test_a_scheduler_that_is_not_here(
    case: tuple[str, ...],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    planned(*case)
    alone_in_path(tmp_path / "bin", monkeypatch)
    assert refused(capsys, tmp_path / "runs", *case) == (4, [code])


@pytest.mark.parametrize(
    ("case", "code"),
    [
        (ALL["slurm-apptainer"], "LA011"),
        (ALL["slurm-pyxis"], "LA011"),
        (("tiny", *TWO_NODES, "cluster.target.kind=kubernetes"), "LA033"),
    ],
    ids=["apptainer", "enroot", "kubernetes"],
)
def test_an_image_that_is_not_there(
    case: tuple[str, ...],
    code: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in ("sbatch", "kubectl"):
        program(tmp_path / "bin", name, "exit 0")
    first_in_path(tmp_path / "bin", monkeypatch)
    assert refused(capsys, tmp_path / "runs", *case) == (4, [code])
    assert calls(tmp_path / "bin", "sbatch") == []


def test_a_plan_whose_blueprint_has_changed_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = tmp_path / "mine.yaml"
    mine.write_text("defaults: [tiny, _self_]\nname: mine\n")
    assert shipway(["build", "mine.yaml", "--out", "b", "--quiet"]) == 0
    mine.write_text("defaults: [tiny, _self_]\nname: mine\ntraining: {seed: 7}\n")
    capsys.readouterr()
    assert refused(capsys, tmp_path / "runs") == (5, ["PL010"])


def test_a_run_is_not_resumed_with_another_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert isinstance(write_build(planned("tiny"), tmp_path / "b"), BuildFolder)
    entry = RunRecord(
        id="r", name="tiny", plan_hash="sha256:other", target="local", build=str(tmp_path / "b"),
        launched_at=record.now(),
    )  # fmt: skip
    record.write_record(tmp_path / "runs" / "r", entry)
    assert shipway(["resume", "r", "--runs", str(tmp_path / "runs"), "--json"]) == 5
    assert json.loads(capsys.readouterr().out)["diagnostics"][0]["code"] == "LA062"


def test_an_image_that_holds_another_plan(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    (tmp_path / "launched.json").write_text('{"newer": true}')
    (tmp_path / "start.sh").write_text(launch_files(planned(*ALL["jobset"]))["launch/start.sh"])
    given = {"SHIPWAY_BUILD": str(tmp_path), "SHIPWAY_RUN": str(tmp_path / "run")}
    given |= {"PATH": os.environ["PATH"], "SHIPWAY_PLAN": str(tmp_path / "launched.json")}
    done = subprocess.run(
        ["bash", str(tmp_path / "start.sh"), "long"], env=given, capture_output=True, text=True, check=False
    )
    assert done.returncode == 4
    assert "another plan" in done.stderr
    assert (tmp_path / "run/halt-1").exists(), "later stages do not wait for this one"


def test_a_slurm_job_that_was_given_other_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = planned(*ALL["slurm-gpu"])
    (name,) = [name for name in launch_files(plan) if name.endswith("01-8k.sbatch")]
    script = tmp_path / "stage.sbatch"
    script.write_text(launch_files(plan)[name])
    program(tmp_path / "bin", "scontrol", "echo n1")
    first_in_path(tmp_path / "bin", monkeypatch)
    (tmp_path / "run").mkdir()
    slurm = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-9]", "SLURM_GPUS_ON_NODE": "4"}
    command = ["bash", str(script), str(tmp_path), str(tmp_path / "run")]
    done = subprocess.run(command, env={**os.environ, **slurm}, capture_output=True, text=True, check=False)
    assert done.returncode == 4, done.stderr
    assert "the plan is for 8 GPUs on a node, Slurm gave 4" in done.stdout
    (attempt,) = record.read_attempts(tmp_path / "run")
    assert (attempt.reason, attempt.exit_code, attempt.nodes) == ("preflight", 4, "n[1-9]")


def test_nodes_with_other_devices_are_named_and_end_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The pre-flight as the scripts call it: on two nodes, of which one has lost a GPU, then the verdict."""
    build = tmp_path / "b"
    assert isinstance(write_build(planned(*ONE_H100_NODE), build), BuildFolder)
    row = f"{H100}, 570.1, 0, Not Active"
    links = "".join(f"GPU {gpu}:\n" + "\t Link 0: 480.0 GB/s\n" for gpu in range(8))
    script = f"[ $1 = nvlink ] && printf '{links}' && exit\nfor i in $(seq $GPUS); do echo '{row}'; done"
    program(tmp_path / "bin", "nvidia-smi", script)
    first_in_path(tmp_path / "bin", monkeypatch)
    monkeypatch.setattr("shipway.runtime.preflight.node.STORAGE_BYTES", 1 << 20)
    for node, gpus in (("good", "8"), ("bad", "7")):
        monkeypatch.setenv("SHIPWAY_NODE", node)
        monkeypatch.setenv("GPUS", gpus)
        assert preflight(["node", str(build), "--run-dir", str(tmp_path / "run")]) == 0
    verdict = ["verdict", str(build), "--run-dir", str(tmp_path / "run")]
    assert preflight([*verdict, "--need", "2", "good", "bad"]) == 4
    told = capsys.readouterr().out
    assert "1 of 2 nodes are good, 2 needed" in told
    assert "exclude: bad" in told
    assert preflight([*verdict, "--need", "1", "good", "bad"]) == 0
    assert (tmp_path / "run/preflight/chosen").read_text() == "good\n"


@pytest.mark.parametrize("case", [ALL["slurm-gpu"], (*ON_GPUS, *KUBERNETES)], ids=["slurm", "kubernetes"])
def test_a_dry_run_needs_nothing_of_this_machine(
    case: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert isinstance(write_build(planned(*case), tmp_path / "b"), BuildFolder)
    alone_in_path(tmp_path / "bin", monkeypatch)
    runs = tmp_path / "runs"
    assert shipway(["launch", str(tmp_path / "b"), "--dry-run", "--runs", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["commands"]
    assert not runs.exists()


def test_the_doctor_asks_the_cluster_that_a_build_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(write_build(planned(*ALL["jobset"]), tmp_path / "b"), BuildFolder)
    program(tmp_path / "bin", "kubectl", '[[ $2 != pvc ]] || { echo "NotFound: no such claim" >&2; exit 1; }')
    first_in_path(tmp_path / "bin", monkeypatch)
    found = probe(tmp_path / "b")
    assert not isinstance(found, Refusal)
    assert [finding.state for finding in found] == ["ok", "ok", "ok", "problem"]
    assert found[-1].detail == "not so: the volume of runs is there: NotFound: no such claim"
    alone_in_path(tmp_path / "none", monkeypatch)
    found = probe(tmp_path / "b")
    assert not isinstance(found, Refusal)
    (lacks,) = found
    assert lacks.detail.startswith("LA030: ")
