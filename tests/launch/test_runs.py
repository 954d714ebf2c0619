"""Commands on a run, over the files that a run's folder holds."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.emit.build import BuildFolder
from shipway.compiler.emit.build import build as write_build
from shipway.compiler.launch import record
from shipway.compiler.launch.execute import execute
from shipway.compiler.launch.held import held
from shipway.compiler.launch.launch import Launch as Ready
from shipway.compiler.launch.launch import Refusal, Started, prepare, read_plan, start
from shipway.compiler.launch.target import Command
from shipway.compiler.rules.variables import refusal
from shipway.schemas.cluster import LocalTarget
from shipway.schemas.plan import canonical_json, content_hash
from shipway.schemas.run import Attempt, Job, RunRecord
from tests.launch.builds import TWO_NODES, built, planned
from tests.launch.stand_ins import alone_in_path, calls, first_in_path, program
from tests.launch.targets import SLURM

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


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--rank", "7"), "Ranks there are: 0, 1."),
        (("--rank", "-1"), "Ranks there are: 0, 1."),
        (("--attempt", "9"), "Attempts there are: 1, 2."),
        (("--attempt", "-1", "-f"), "Attempts there are: 1, 2."),
        (("--rank", "7", "--attempt", "1"), "Ranks there are: 0, 1."),
    ],
)
def test_ranks_and_attempts_that_are_not_there_are_wrong_usage(
    options: tuple[str, ...], words: str, runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "new" / "attempts" / "2").mkdir()
    assert shipway(["logs", *options, "--runs", str(runs)]) == 2
    told = capsys.readouterr()
    assert (told.out, words in told.err) == ("", True)


def test_logs_of_nodes_that_share_files_know_the_ranks_that_wrote(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "new" / "logs").mkdir()
    (runs / "new" / "logs" / "node1.log").write_text("starting\n[rank 3] hello\n")
    assert shipway(["logs", "--rank", "3", "--runs", str(runs)]) == 0
    assert capsys.readouterr().out == "[rank 3] hello\n"
    assert shipway(["logs", "--rank", "4", "--runs", str(runs)]) == 2
    assert "Ranks there are: 3." in capsys.readouterr().err


def test_logs_are_of_the_last_attempt_that_wrote_something(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs = runs / "new" / "attempts" / "2" / "logs" / "x" / "attempt_0" / "0"
    logs.mkdir(parents=True)
    (logs / "stdout.log").touch()
    assert shipway(["logs", "--runs", str(runs)]) == 0
    told = capsys.readouterr()
    assert told.out == "[rank 0] hello from 0\n[rank 1] hello from 1\n"
    assert told.err == "attempt 2 has written nothing: this is attempt 1\n"
    assert shipway(["logs", "--attempt", "2", "--runs", str(runs)]) == 0
    assert capsys.readouterr().err == "nothing was written yet\n"


def test_a_run_that_is_done_is_neither_resumed_nor_profiled(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (runs / "new" / "status.json").write_text(json.dumps({"state": "done"}))
    before = sorted(runs.rglob("*"))
    assert shipway(["resume", "new", "--runs", str(runs)]) == 0
    assert capsys.readouterr().err.startswith("new is done")
    assert shipway(["resume", "new", "--runs", str(runs), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["state"] == "done"
    assert shipway(["profile", "new", "--runs", str(runs)]) == 4
    told = capsys.readouterr().err
    assert "new is done" in told
    assert "resume" not in told
    assert sorted(runs.rglob("*")) == before


def test_of_several_running_runs_stop_wants_a_name_and_others_tell_which(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with process_named("shipway.runtime.supervisor") as pid:
        for name in ("old", "new"):
            (runs / name / "status.json").write_text(json.dumps({"state": "running"}))
            (runs / name / "supervisor.pid").write_text(f"{pid}\n{socket.gethostname()}\n")
        assert shipway(["stop", "--runs", str(runs)]) == 2
        assert "Name one of them: new, old." in capsys.readouterr().err
        for command in ("logs", "profile"):
            assert shipway([command, "--runs", str(runs)]) == 0
            assert "2 runs are running (new, old): this is new" in capsys.readouterr().err
        (runs / "old" / "halt").touch()
        assert shipway(["logs", "--runs", str(runs)]) == 0
        assert capsys.readouterr().err == ""
    assert not (runs / "new" / "halt").exists()


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
    (whole / "runs" / "r" / "status.json").write_text(json.dumps({"state": state}))
    with process_named("shipway.runtime.supervisor") as pid:
        (whole / "runs" / "r" / "supervisor.pid").write_text(f"{pid}\n{socket.gethostname()}\n")
        for arguments in (["launch", "b"], ["resume", "r"]):
            assert shipway(arguments) == 4
            told = capsys.readouterr().err
            assert told.startswith("error[LA061]: the run r is running already")
            assert "shipway logs -f r" in told
            assert ("--new" in told) == (arguments[0] == "launch")


def told_of(run: str, runs: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """State and detail as `shipway status` tells them."""
    capsys.readouterr()
    assert shipway(["status", run, "--runs", str(runs), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    return told["state"], told["detail"]


def test_a_supervisor_is_one_by_its_command_line_and_its_machine(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its number may belong to a stranger by now; one on another machine cannot be looked at."""
    (runs / "new" / "status.json").write_text(json.dumps({"state": "running"}))
    pid_file = runs / "new" / "supervisor.pid"
    pid_file.write_text(f"{os.getpid()}\n")
    state, detail = told_of("new", runs, capsys)
    assert (state, "supervisor is gone" in detail) == ("failed", True)
    pid_file.write_text("1\na-login-node\n")
    assert told_of("new", runs, capsys) == ("running", "on a-login-node")
    pid_file.write_text("")
    assert told_of("new", runs, capsys)[0] == "failed"


def test_workers_that_outlived_their_supervisor_are_told_and_can_be_stopped(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with process_named("shipway.runtime.main") as pid:
        (runs / "new" / "attempts" / "1" / "rank0.pid").write_text(f"{pid}\n")
        state, detail = told_of("new", runs, capsys)
        assert (state, "without its supervisor" in detail) == ("running", True)
        assert shipway(["stop", "new", "--runs", str(runs), "--quiet"]) == 0
        os.waitpid(pid, 0)
    assert told_of("new", runs, capsys)[0] == "stopped"


def test_an_agent_without_its_supervisor_counts_before_it_has_workers(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with process_named("shipway.runtime.elastic") as pid:
        (runs / "new" / "attempts" / "1" / "agent.pid").write_text(f"{pid}\n")
        state, detail = told_of("new", runs, capsys)
        assert (state, "the workers save and end" in detail) == ("running", True)


@contextlib.contextmanager
def process_named(words: str) -> Iterator[int]:
    """A process that has `words` in its command line and does nothing."""
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", words])
    try:
        while words.encode() not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
            time.sleep(0.01)
        yield process.pid
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def slurm_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A build for Slurm whose scheduler takes one job and refuses the next; the folder of its run `r`."""
    built(tmp_path / "b", "tiny", *TWO_NODES, *SLURM)
    taken = '[[ " $* " == *" --test-only "* ]] && exit\nmkdir "$0.taken" || exit 1\necho 41'
    program(tmp_path / "bin", "sbatch", taken)
    program(tmp_path / "bin", "scancel", "exit 0")
    first_in_path(tmp_path / "bin", monkeypatch)
    return tmp_path / "runs" / "r"


def test_a_chain_that_is_refused_in_part_is_taken_back(slurm_run: Path) -> None:
    ready = prepare(slurm_run.parent.parent / "b", slurm_run.parent, run_id="r")
    assert isinstance(ready, Ready)
    started = start(ready)
    assert isinstance(started, Started)
    assert (started.code, started.jobs) == (4, ())
    assert calls(slurm_run.parent.parent / "bin", "scancel") == ["41"]
    assert not list((slurm_run / "jobs").iterdir())


def test_the_record_names_jobs_even_when_the_client_died_before_it_could(slurm_run: Path) -> None:
    ready = prepare(slurm_run.parent.parent / "b", slurm_run.parent, run_id="r")
    assert isinstance(ready, Ready)
    start(ready)
    (slurm_run / "jobs" / "01-short").write_text("41 short\n")
    (slurm_run / "jobs" / "02-long").write_text("42 long\n")
    entry = record.read_record(slurm_run)
    assert entry is not None
    assert [(job.stage, job.id) for job in entry.jobs] == [("short", "41"), ("long", "42")]


def test_of_two_launches_at_once_one_is_refused(slurm_run: Path) -> None:
    builds = slurm_run.parent.parent / "b"
    first, second = (prepare(builds, slurm_run.parent, run_id="r") for _ in range(2))
    assert isinstance(first, Ready)
    assert isinstance(second, Ready)
    start(first)
    refused = start(second)
    assert isinstance(refused, Refusal)
    assert (refused.code, refused.diagnostics[0].code) == (4, "LA061")
    again = prepare(builds, slurm_run.parent, run_id="r")
    assert isinstance(again, Ready)
    with held(slurm_run, fresh=False):
        assert isinstance(start(again), Refusal)


def test_a_folder_that_cannot_be_written_is_told(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (whole / "file").write_text("")
    for runs in (whole / "file", Path("/proc/runs")):
        assert shipway(["launch", "b", "--runs", str(runs)]) == 4
        assert "error[LA007]" in capsys.readouterr().err


def test_a_run_that_a_full_disk_cannot_note_leaves_no_folder(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Python 3.11 would leave modules cut short for who loads them next.
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        assert shipway(["launch", "b"]) == 4
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list((whole / "runs").iterdir()) == []


def test_a_scheduler_that_is_gone_or_does_not_answer_is_told(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = record.read_record(runs / "new")
    assert entry is not None
    (runs / "new" / "attempts.jsonl").unlink()
    job = Job(stage="short", id="7")
    record.write_record(runs / "new", entry.model_copy(update={"target": "slurm", "jobs": (job,)}))
    alone_in_path(tmp_path / "bin", monkeypatch)
    assert told_of("new", runs, capsys) == (
        "unknown",
        "the scheduler does not answer: there is no squeue here",
    )
    assert shipway(["stop", "new", "--runs", str(runs)]) == 4
    assert "there is no scancel here" in capsys.readouterr().err
    program(tmp_path / "bin", "squeue", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1")
    assert told_of("new", runs, capsys) == ("stopped", "left the queue")


def test_what_a_foreground_command_prints_stays_out_of_the_data(capfd: pytest.CaptureFixture[str]) -> None:
    command = Command(("sh", "-c", "echo step 1; exit 3"), "train", foreground=True)
    assert execute(command, quiet_stdout=True) == (3, "")
    assert tuple(capfd.readouterr()) == ("", "step 1\n")
    assert execute(Command(("no-such-program",), "try")) == (127, "there is no no-such-program here\n")


def test_logs_of_pods_are_filtered_by_rank(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = record.read_record(runs / "new")
    assert entry is not None
    job = Job(stage="short", id="ns/jobset/new-01")
    record.write_record(runs / "new", entry.model_copy(update={"target": "kubernetes", "jobs": (job,)}))
    program(tmp_path / "bin", "kubectl", "printf '[pod/a] [rank 0] x\\n[pod/b] [rank 1] y\\n'")
    first_in_path(tmp_path / "bin", monkeypatch)
    assert shipway(["logs", "new", "--rank", "1", "--runs", str(runs)]) == 0
    assert capsys.readouterr().out == "[pod/b] [rank 1] y\n"
    program(tmp_path / "bin", "kubectl", "exit 1")
    assert shipway(["logs", "new", "--runs", str(runs)]) == 4


def test_logs_as_data_and_followed_to_the_end_of_the_run(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options in ((), ("-f",)):
        assert shipway(["logs", "--json", *options, "--runs", str(runs)]) == 0
        lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert lines == [{"rank": rank, "text": f"[rank {rank}] hello from {rank}"} for rank in (0, 1)]


def test_nodes_that_the_user_names_are_kept_out(slurm_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ready = prepare(slurm_run.parent.parent / "b", slurm_run.parent, run_id="r")
    assert isinstance(ready, Ready)
    start(ready)
    assert shipway(["resume", "r", "--exclude", "n7,n8", "--runs", str(slurm_run.parent)]) == 4
    assert all("--exclude=n7,n8" in call for call in calls(slurm_run.parent.parent / "bin", "sbatch")[-2:])


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
def test_rendezvous_and_secrets_may_not_stand_in_a_blueprint(name: str) -> None:
    assert refusal(name, "x") is not None
    assert refusal("NCCL_IB_HCA", "mlx5") is None


@pytest.mark.parametrize("value", ["hf_abcdefghijklmnopqrst", "https://me:pass@proxy.example:3128"])
def test_values_that_give_themselves_away_are_refused(value: str) -> None:
    assert refusal("HUB", value) is not None


def test_a_plan_of_another_version_with_a_secret_in_it_is_not_launched(tmp_path: Path) -> None:
    plan = planned("tiny")
    target = LocalTarget(environment={"HF_TOKEN": "x"})
    blueprint = plan.blueprint.model_copy(
        update={"cluster": plan.blueprint.cluster.model_copy(update={"target": target})}
    )
    old = plan.model_copy(update={"blueprint": blueprint})
    old = old.model_copy(update={"hash": content_hash(old, without="hash")})
    (tmp_path / "plan.json").write_text(canonical_json(old))
    refused = prepare(tmp_path, tmp_path / "runs")
    assert isinstance(refused, Refusal)
    assert "LA004" in [found.code for found in refused.diagnostics]
