"""How a stage's batch script ends, whatever its workers do: with stand-ins for Slurm, in a second each.

The lab (test_slurm.py) shows that the real one plays its part.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from shipway.compiler.launch import record
from tests.launch.builds import TWO_NODES, built
from tests.launch.stand_ins import calls, program
from tests.launch.targets import SLURM

SRUN = """
nodes="n1 n2"
while [[ $1 == --* ]]; do case $1 in --nodelist=*) nodes=${1#*=}; nodes=${nodes//,/ } ;; esac; shift; done
worst=0
tasks=()
for node in $nodes; do SLURMD_NODENAME=$node "$@" & tasks+=($!); done
trap 'kill -USR1 "${tasks[@]}"' USR1
for task in "${tasks[@]}"; do
  while kill -0 "$task" 2>/dev/null; do wait "$task"; done
  wait "$task" || { code=$?; (( code <= worst )) || worst=$code; }
done
exit $worst"""
"""Runs the task of each node here, passes USR1 on, and leaves with the worst code."""
PREFLIGHT = """
cd "$SHIPWAY_RUN/preflight"
[[ " $* " == *" verdict "* ]] || { [[ -e ../silent ]] || echo {} > "$SLURMD_NODENAME.json"; exit; }
printf 'n1\\nn2\\n' > chosen
cp ../bad exclude 2>/dev/null || : > exclude"""
"""Finds all nodes good but those in the run's file `bad`."""


@dataclass(frozen=True)
class Script:
    """A stage's script with stand-ins around it."""

    folder: Path

    @property
    def run(self) -> Path:
        """The run's folder."""
        return self.folder / "run"

    def start(self, train: str) -> subprocess.Popen[str]:
        """Start it; on each node the workers do as `train` says."""
        build = self.folder / "b"
        node = f'[[ $1 == train ]] || exit 0\ncd "$SHIPWAY_RUN"\n{train}\n'
        (build / "launch" / "node.sh").write_text(node)
        given = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]"}
        given |= {"PATH": f"{self.folder}/bin:{os.environ['PATH']}"}
        given |= {"SHIPWAY_PYTHON": str(self.folder / "bin" / "python")}
        command = ["bash", str(build / "launch" / "slurm" / "01-short.sbatch"), str(build), str(self.run)]
        with (self.folder / "log").open("w") as log:
            return subprocess.Popen(command, env=os.environ | given, stdout=log, stderr=log, text=True)

    def end(self, train: str) -> int:
        """The code that it leaves with; negative when the requeue ended it."""
        return self.start(train).wait(60)

    def called(self, name: str) -> list[str]:
        """How a stand-in was called."""
        return [call for call in calls(self.folder / "bin", name) if not call.startswith("show")]

    def reasons(self) -> list[str]:
        """Of the attempts."""
        return [attempt.reason for attempt in record.read_attempts(self.run)]


@pytest.fixture
def script(tmp_path: Path) -> Script:
    """The first of two stages, the other one waiting as job 8."""
    built(tmp_path / "b", "tiny", *TWO_NODES, *SLURM)
    programs = tmp_path / "bin"
    program(programs, "srun", SRUN)
    program(programs, "python", PREFLIGHT)
    program(programs, "sbatch", "echo 99")
    program(programs, "scontrol", "case $1 in show) echo n1; echo n2 ;; requeue) kill -9 $PPID ;; esac")
    (tmp_path / "run" / "jobs").mkdir(parents=True)
    (tmp_path / "run" / "jobs" / "02-long").write_text("8 long\n")
    return Script(tmp_path)


def test_a_request_to_stop_reaches_the_workers_which_save(script: Script) -> None:
    job = script.start("trap 'exit 75' USR1; touch here; while true; do sleep 0.05; done")
    until = time.monotonic() + 60
    while not (script.run / "here").exists():
        assert time.monotonic() < until, (script.folder / "log").read_text()
        time.sleep(0.05)
    job.send_signal(signal.SIGUSR1)
    assert job.wait(60) == -signal.SIGKILL
    assert script.reasons() == ["preempted"]
    assert script.called("scontrol") == ["requeue 7"]


def test_a_stage_that_is_done_leaves_with_0_and_notes_nothing_else(script: Script) -> None:
    assert script.end("exit 0") == 0
    assert script.reasons() == ["done"]
    assert (script.called("scontrol"), script.called("sbatch")) == ([], [])


def test_a_fatal_code_is_never_requeued(script: Script) -> None:
    assert script.end("exit 77") == 77
    assert script.reasons() == ["fatal"]
    assert (script.run / "halt").read_text() == "77\n"
    assert (script.called("scontrol"), script.called("sbatch")) == ([], [])
    assert script.end("exit 0") == 1, "nor by hand, while the file is there"


def test_a_failure_that_may_pass_is_requeued(script: Script) -> None:
    assert script.end("exit 76") == -signal.SIGKILL
    assert script.reasons() == ["retryable"]
    assert script.called("scontrol") == ["requeue 7"]


def test_a_node_that_failed_is_left_out_by_another_job_before_the_chain(script: Script) -> None:
    assert script.end('echo n2 > "$SHIPWAY_RUN/bad"; exit 76') == 76
    assert script.reasons() == ["retryable"]
    assert (script.run / "exclude").read_text() == "n2\n"
    assert [call.split()[1] for call in script.called("sbatch")] == ["--exclude=n2"]
    assert (script.run / "jobs" / "01-short").read_text() == "99 short\n"
    assert script.called("scontrol") == ["update JobId=8 Dependency=afterok:99"]


def test_an_attempt_that_could_not_say_how_it_ended_is_noted_by_the_next(script: Script) -> None:
    (script.run / "attempts" / "1").mkdir(parents=True)
    begun = '{"number": 1, "stage": "short", "job": "7", "nodes": "n3", "started_at": "2026-11-30T10:00:00Z"'
    (script.run / "attempts" / "1" / "begun").write_text(begun + "\n")
    assert script.end("exit 0") == 0
    assert script.reasons() == ["lost", "done"]


def test_where_no_node_answers_none_is_blamed(script: Script) -> None:
    """The job itself is ending, or Python is not there: to exclude all nodes would leave none."""
    assert script.end('touch "$SHIPWAY_RUN/silent"; exit 76') == -signal.SIGKILL
    assert script.called("scontrol") == ["requeue 7"]
    assert script.end("exit 0") == 4
    assert script.reasons() == ["retryable", "preflight"]
    assert not (script.run / "exclude").exists()
    assert script.called("sbatch") == []
