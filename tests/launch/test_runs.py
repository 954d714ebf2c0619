"""Commands on a run, over the files that a run's folder holds."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.emit.build import BuildFolder
from shipway.compiler.emit.build import build as write_build
from shipway.compiler.launch import record
from shipway.compiler.launch.launch import Launch as Ready
from shipway.compiler.launch.launch import Refusal, prepare, read_plan
from shipway.schemas.run import Attempt, RunRecord
from tests.launch.builds import built, planned

ATTEMPT = Attempt(
    number=1, stage="short", job="7", nodes="n1", started_at="2026-11-30T10:00:00Z",
    ended_at="2026-11-30T10:05:00Z", exit_code=75, reason="stopped",
)  # fmt: skip


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two local runs at rest, the second one newer and stopped at step 3."""
    for name, hour in (("old", 9), ("new", 10)):
        entry = RunRecord(
            id=name, name="tiny", plan_hash="sha256:0", target="local", build=str(tmp_path / "build"),
            launched_at=f"2026-11-30T{hour:02d}:00:00Z",
        )  # fmt: skip
        record.write_record(tmp_path / "runs" / name, entry)
    new = tmp_path / "runs" / "new"
    (new / "attempts.jsonl").write_text(ATTEMPT.model_dump_json() + "\n")
    (new / "status.json").write_text(json.dumps({"state": "stopped", "step": 3}))
    steps = [{"stage": "short", "step": step, "loss": 5.0 - step} for step in (1, 2, 3)]
    (new / "metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps) + '{"stage": "sh')
    for step, name in ((2, "complete.json"), (3, "half.distcp")):
        checkpoint = new / "checkpoints" / f"step-{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / name).touch()
    logs = new / "attempts" / "1" / "logs" / "x" / "attempt_0"
    for rank in (0, 1):
        (logs / str(rank)).mkdir(parents=True)
        (logs / str(rank) / "stdout.log").write_text(f"hello from {rank}\n")
    return tmp_path / "runs"


def test_status_is_of_the_newest_run_unless_one_is_named(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shipway(["status", "--runs", str(runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["run"], told["state"]) == ("new", "stopped")
    assert told["progress"] == {"stage": "short", "step": 3, "loss": 2.0}
    assert Path(told["checkpoint"]).name == "step-00000002"
    assert [attempt["reason"] for attempt in told["attempts"]] == ["stopped"]
    assert shipway(["status", "old", "--runs", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["run"] == "old"


def test_a_run_that_is_not_there_is_told_with_those_that_are(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shipway(["status", "nwe", "--runs", str(runs)]) == 4
    told = capsys.readouterr().err
    assert "there is no run 'nwe'" in told
    assert "new, old" in told


@pytest.mark.parametrize("text", ["{", "{}", '"a string"'])
def test_a_run_whose_record_cannot_be_read_is_told_as_such(
    text: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "odd").mkdir()
    (runs / "odd" / "run.json").write_text(text)
    for name in ("odd", str(runs / "odd")):
        assert shipway(["status", name, "--runs", str(runs)]) == 4
        told = capsys.readouterr().err
        assert told.startswith(f"error[LA063]: {runs}/odd/run.json cannot be read: ")
    assert shipway(["status", "--runs", str(runs), "-q"]) == 0


def test_list_has_the_newest_first(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shipway(["list", "--runs", str(runs), "--json"]) == 0
    assert [run["run"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["new", "old"]


def test_logs_name_the_rank_of_each_line(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shipway(["logs", "--runs", str(runs)]) == 0
    assert capsys.readouterr().out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"
    assert shipway(["logs", "--rank", "1", "--runs", str(runs)]) == 0
    assert capsys.readouterr().out == "[rank 1] hello from 1\n"


def test_stop_keeps_a_run_down_and_a_launch_lifts_it(runs: Path) -> None:
    assert shipway(["stop", "new", "--runs", str(runs), "--quiet"]) == 0
    assert (runs / "new" / "halt").exists()
    record.lift_halt(runs / "new")
    assert not (runs / "new" / "halt").exists()


def test_resume_refuses_a_build_that_is_gone(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shipway(["resume", "new", "--runs", str(runs)]) == 4
    assert "is not a build folder" in capsys.readouterr().err


def test_launching_again_continues_the_unfinished_run_of_the_same_plan(tmp_path: Path) -> None:
    build = built(tmp_path / "build", "tiny")
    first = prepare(build, tmp_path / "runs")
    assert isinstance(first, Ready)
    assert not first.continues
    entry = RunRecord(
        id="r",
        name="tiny",
        plan_hash=first.plan.hash,
        target="local",
        build=str(build),
        launched_at=record.now(),
    )
    record.write_record(tmp_path / "runs" / "r", entry)
    again = prepare(build, tmp_path / "runs")
    assert isinstance(again, Ready)
    assert (again.run.id, again.continues) == ("r", True)
    fresh = prepare(build, tmp_path / "runs", new=True)
    assert isinstance(fresh, Ready)
    assert fresh.run.id != "r"


@pytest.fixture
def whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the build folder `b` as `shipway build` writes it."""
    monkeypatch.chdir(tmp_path)
    assert isinstance(write_build(planned("tiny"), tmp_path / "b"), BuildFolder)
    return tmp_path


@pytest.mark.parametrize("name", ["plan.json", "model.py"])
@pytest.mark.parametrize("options", [(), ("--dry-run",)])
def test_a_build_folder_that_lost_a_file_is_refused(
    name: str, options: tuple[str, ...], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (whole / "b" / name).unlink()
    assert shipway(["launch", "b", *options]) == 4
    told = capsys.readouterr().err
    assert f"error[LA005]: b lacks {name}" in told
    assert "--out b --force" in told
    assert not (whole / "runs").exists()


def test_an_edited_file_is_named_and_used(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert shipway(["launch", "b", "--dry-run"]) == 0
    assert "warning" not in capsys.readouterr().err
    with (whole / "b" / "model.py").open("a") as file:
        file.write("# mine\n")
    assert shipway(["launch", "b", "--dry-run"]) == 0
    assert "warning[LA006]: b/model.py was edited" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["running", "retryable"])
def test_a_run_whose_supervisor_is_there_is_not_launched_twice(
    state: str, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = RunRecord(
        id="r", name="tiny", plan_hash=planned("tiny").hash, target="local", build=str(whole / "b"),
        launched_at=record.now(),
    )  # fmt: skip
    record.write_record(whole / "runs" / "r", entry)
    (whole / "runs" / "r" / "supervisor.pid").write_text(f"{os.getpid()}\n")
    (whole / "runs" / "r" / "status.json").write_text(json.dumps({"state": state}))
    for arguments in (["launch", "b"], ["resume", "r"]):
        assert shipway(arguments) == 4
        told = capsys.readouterr().err
        assert told.startswith("error[LA061]: the run r is running already")
        assert "shipway logs -f r" in told
        assert ("--new" in told) == (arguments[0] == "launch")


def test_a_plan_that_was_edited_is_refused_as_stale(tmp_path: Path) -> None:
    build = built(tmp_path / "build", "tiny")
    text = (build / "plan.json").read_text()
    (build / "plan.json").write_text(text.replace('"calibration": "', '"calibration": "other '))
    refused = read_plan(build)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.diagnostics[0].code) == (5, "LA003")


@pytest.mark.parametrize(
    "name", ["MASTER_ADDR", "WORLD_SIZE", "SHIPWAY_RUN", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY"]
)
def test_rendezvous_and_secrets_are_refused_in_a_blueprint(name: str, tmp_path: Path) -> None:
    build = built(tmp_path / "build", "tiny", f"+cluster.target.environment.{name}=x")
    refused = prepare(build, tmp_path / "runs")
    assert isinstance(refused, Refusal)
    assert refused.code == 4
    assert name in refused.diagnostics[0].summary
