"""The supervisor with real processes: torchrun, a worker that is killed, a run that is asked to stop.

Slower than other files: nothing but whole starts (import of torch included) can show this.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shipway.runtime.attempts import end_strays, explain, next_number, record_deaths
from shipway.runtime.distributed import free_port
from shipway.runtime.echo import Echo
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.lock import RunLock
from shipway.runtime.metrics import read_metrics
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.supervisor import Supervisor, ways_to_continue
from shipway.schemas.layout import Layout
from tests.runtime.small_plan import small_plan, write_build

DEADLINE_SECONDS = 180


def supervise(build: Path, run: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "shipway.runtime.supervisor", str(build), "--run-dir", str(run)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "--device", "cpu"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


def steps(run: Path) -> list[int]:
    return [line["step"] for line in read_metrics(run / "metrics.jsonl") if "event" not in line]


def wait_until(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + DEADLINE_SECONDS
    while not condition():
        assert time.monotonic() < until, "what was waited for did not come"
        time.sleep(0.05)


def wait_for_step(run: Path, step: int) -> None:
    wait_until(lambda: step in steps(run))


def exit_codes(run: Path) -> list[int]:
    return [json.loads(line)["exit_code"] for line in (run / "attempts.jsonl").read_text().splitlines()]


def test_killed_worker_is_replaced_and_a_request_to_stop_saves(tmp_path: Path) -> None:
    layout = Layout(data_parallel_shard=2, micro_batch=2)
    options = {"checkpoints": {"every_steps": 2}, "evaluation": {"every_steps": 1000, "sequences": 2}}
    build = write_build(small_plan({"only": 300}, [layout], sequences=4, **options), tmp_path / "build")
    run = tmp_path / "run"
    supervisor = supervise(build, run)
    try:
        wait_for_step(run, 3)
        os.kill(int((run / "attempts/1/rank1.pid").read_text()), signal.SIGKILL)
        wait_for_step(run, 8)
        supervisor.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        supervisor.send_signal(signal.SIGTERM)  # `shipway stop` a second time kills nothing
        output, _ = supervisor.communicate(timeout=DEADLINE_SECONDS)
    finally:
        supervisor.kill()
    assert supervisor.returncode == ExitCode.PREEMPTED
    assert exit_codes(run) == [ExitCode.RETRYABLE, ExitCode.PREEMPTED]
    assert "rank 1 was killed by SIGKILL" in output
    assert "Traceback" not in output
    assert steps(run) == list(range(1, len(steps(run)) + 1)), "no step twice, none left out"
    saved = json.loads(next((run / "checkpoints").glob(f"*{steps(run)[-1]:08d}/complete.json")).read_text())
    assert saved["progress"]["position"]["step"] == steps(run)[-1]
    assert json.loads((run / "status.json").read_text())["state"] == "stopped"
    assert "attempt 2 stopped as asked: the workers saved" in output
    assert [line for line in output.splitlines() if line.startswith("only  step ")], "rank 0 is shown"
    assert list(run.glob("attempts/2/logs/*/attempt_0/0/stdout.log")), "and logged"
    assert "preempted" not in output
    assert "death signal" not in output
    assert output.splitlines()[-1].startswith("continue with `shipway launch ")
    assert not list(run.glob("attempts/*/rank*.pid")), "no worker is left behind"


def test_workers_save_and_end_when_their_supervisor_is_killed(tmp_path: Path) -> None:
    options = {"checkpoints": {"every_steps": 100_000}, "evaluation": {"every_steps": 1000, "sequences": 2}}
    plan = small_plan({"only": 3000}, [Layout(micro_batch=2)], sequences=4, **options)
    build, run = write_build(plan, tmp_path / "build"), tmp_path / "run"
    supervisor = supervise(build, run)
    try:
        wait_for_step(run, 2)
    finally:
        supervisor.kill()
        supervisor.communicate(timeout=DEADLINE_SECONDS)  # ends when the agent has left, too
    reason = json.loads((run / "attempts/1/rank0.json").read_text())
    assert reason["code"] == ExitCode.PREEMPTED
    saved = json.loads(next((run / "checkpoints").glob("*/complete.json")).read_text())
    assert saved["progress"]["position"]["step"] == steps(run)[-1]


def test_a_stop_before_the_workers_train_is_no_failure(tmp_path: Path) -> None:
    build = write_build(small_plan({"only": 300}, [Layout(micro_batch=2)], sequences=4), tmp_path / "build")
    run = tmp_path / "run"
    supervisor = supervise(build, run)
    try:
        wait_until(lambda: (run / "attempts/1").is_dir())
        supervisor.send_signal(signal.SIGINT)
        output, _ = supervisor.communicate(timeout=DEADLINE_SECONDS)
    finally:
        supervisor.kill()
    assert supervisor.returncode == ExitCode.PREEMPTED
    assert "attempt 1 stopped as asked: the workers were stopped before they could save" in output
    assert "left no word" not in output
    assert steps(run) == []


def test_ways_to_continue_are_as_typed_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said = ways_to_continue(Path("build/x"), tmp_path / "runs" / "x-1")
    assert said == "`shipway launch build/x` or `shipway resume x-1`"
    said = ways_to_continue(Path("build/x"), tmp_path / "elsewhere" / "x-1")
    assert said == "`shipway launch build/x --runs elsewhere` or `shipway resume elsewhere/x-1`"


def test_failure_that_would_repeat_is_not_repeated(tmp_path: Path) -> None:
    build = write_build(small_plan({"only": 3}, [Layout(micro_batch=3)], sequences=4), tmp_path / "build")
    (build / "model.py").write_text("import a_module_that_is_not_there\n")
    supervisor = supervise(build, tmp_path / "run")
    output, _ = supervisor.communicate(timeout=DEADLINE_SECONDS)
    assert supervisor.returncode == ExitCode.FATAL
    assert exit_codes(tmp_path / "run") == [ExitCode.FATAL]
    assert "a_module_that_is_not_there" in output
    assert "Traceback" not in output


def test_reason_is_that_of_the_rank_with_the_gravest_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SHIPWAY_ATTEMPT", "4")
    run = RunFolder(tmp_path)
    run.write_exit(0, ExitCode.RETRYABLE, "a peer is gone")
    run.write_exit(1, ExitCode.FATAL, "the data has no such file")
    assert "rank 1 on" in explain(run.attempt, ExitCode.FATAL)
    assert explain(run.attempt, ExitCode.FATAL).endswith("the data has no such file")
    record_deaths(run.attempt, {0: 76, 2: -9})
    assert explain(run.attempt, ExitCode.RETRYABLE) == "rank 2 was killed by SIGKILL"
    assert next_number(tmp_path) == 5


def test_every_rank_writes_to_files_of_the_attempt(tmp_path: Path) -> None:
    plan = small_plan({"only": 1}, [Layout(data_parallel_shard=4, micro_batch=2)])
    command = Supervisor(plan, tmp_path, RunFolder(tmp_path / "run")).command(tmp_path / "attempt")
    assert command[command.index("--redirects") + 1] == "3"
    assert command[command.index("--nproc-per-node") + 1] == "4"


def test_the_echo_is_what_rank_0_wrote(tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    for rank in (0, 1):
        folder = tmp_path / "none_x" / "attempt_0" / str(rank)
        folder.mkdir(parents=True)
        (folder / "stdout.log").write_text(f"step of {rank} …\n")
        (folder / "stderr.log").write_text(f"word of {rank}\n")
    echo = Echo(tmp_path)
    echo.start()
    echo.finish()
    captured = capfdbinary.readouterr()
    assert (captured.out.decode(), captured.err) == ("step of 0 …\n", b"word of 0\n")


def test_a_terminal_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    script = """
import os, signal
from shipway.runtime.supervisor import Supervisor, say
Supervisor(None, None, None).install_signals()
say("before")
os.kill(os.getpid(), signal.SIGHUP)
say("after")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "before\n", "")


def test_workers_without_a_supervisor_are_ended_before_others_start(tmp_path: Path) -> None:
    attempt = tmp_path / "attempts" / "1"
    attempt.mkdir(parents=True)
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    stray = subprocess.Popen([*sleep, "shipway.runtime.main"])
    stranger = subprocess.Popen(sleep)
    said: list[str] = []
    try:
        (attempt / "rank0.pid").write_text(f"{stray.pid}\n")
        (attempt / "rank1.pid").write_text(f"{stranger.pid}\n")
        threading.Timer(0, stray.wait).start()  # else it stays a zombie of this process
        wait_until(lambda: b"runtime.main" in Path(f"/proc/{stray.pid}/cmdline").read_bytes())
        end_strays(tmp_path, said.append)
        assert stray.wait() == -signal.SIGTERM
        assert stranger.poll() is None, "a number that a stranger has now is not ours"
    finally:
        stray.kill()
        stranger.kill()
        stranger.wait()
    assert len(said) == 1
    assert not list(attempt.glob("*.pid"))


def test_a_run_has_one_supervisor_and_a_dead_ones_files_do_not_matter(tmp_path: Path) -> None:
    (tmp_path / "supervisor.pid").write_text(f"{os.getpid()}\n")  # of one that was killed
    first, second = RunLock(tmp_path), RunLock(tmp_path)
    first.take()
    with pytest.raises(Fatal, match=f"is running already .process {os.getpid()} on "):
        second.take()
    first.release()
    second.take()
    second.release()


def test_a_rank_that_waits_for_its_peers_ends_at_once_when_it_is_asked_to_stop(tmp_path: Path) -> None:
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "SHIPWAY_ATTEMPT": "1"}
    command = [
        sys.executable,
        "-m",
        "shipway.runtime.main",
        str(tmp_path),
        "--run-dir",
        str(tmp_path / "run"),
    ]
    alone = subprocess.Popen([*command, "--device", "cpu"], env=os.environ | world | place)
    try:
        while not (tmp_path / "run" / "attempts" / "1" / "rank0.pid").exists() and alone.poll() is None:
            time.sleep(0.05)
        time.sleep(0.5)
        alone.send_signal(signal.SIGTERM)
        assert alone.wait(60) == -signal.SIGTERM
    finally:
        alone.kill()
