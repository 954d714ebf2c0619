"""Slurm, the real one: training over two emulated nodes, preemption, a node that dies, stop and resume.

The module's runs are made once (`story`) and looked at by several tests: each start of the workers costs
seconds. One run is left alone; one is preempted by a job of a higher partition, and later loses a node; one
is given a node that fails its pre-flight, and is stopped and resumed by its user.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from shipway.compiler.cli.app import run as shipway
from shipway.compiler.launch import record
from shipway.compiler.launch.excluded import read_excluded
from shipway.compiler.launch.launch import Launch, Started, prepare, start
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.session import train_here
from shipway.runtime.signals import StopRequest
from tests.launch.builds import SHORT, TWO_NODES, built
from tests.launch.secrets import SECRET, files_with
from tests.launch.slurm_lab.lab import SlurmLab
from tests.runtime.ranks import run_ranks

STEPS = ("training.stages.0.tokens=7680", "training.stages.1.tokens=256")
"""30 steps, as trouble must come before the stage is over, however quick the machine; then one."""
SLURM = (*TWO_NODES, *(o for o in SHORT if ".tokens" not in o), *STEPS, "cluster.target.kind=slurm")


@dataclass(frozen=True)
class Story:
    """A run that Slurm gave trouble, what was seen of it on the way, and the same run without trouble."""

    unbroken: Path
    troubled: Path
    nodes: str
    """Nodes that the first stage ran on."""
    queue_after_preemption: str
    lost_node: str


@dataclass(frozen=True)
class Stopped:
    """A run that its user stopped and resumed."""

    run: Path
    second_job: str
    """What Slurm says of the job that took over from the one with the bad node."""
    nodes_when_resumed: str
    at_step: int
    """Step that it had made when it had saved."""


@pytest.fixture(scope="module")
def story(slurm: SlurmLab, tmp_path_factory: pytest.TempPathFactory) -> Story:
    folder = tmp_path_factory.mktemp("story")
    build = built(folder / "build", "tiny", *SLURM)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("WANDB_API_KEY", SECRET)
        run = launch(slurm, build, folder / "runs", "troubled")
    slurm.wait_for(lambda: step(run) >= 2, "the run trains", 900)
    nodes = slurm.nodes(first_job(run))

    slurm.run(
        "sbatch",
        "--partition=urgent",
        "--exclusive",
        f"--nodelist={nodes}",
        "--output=/dev/null",
        "--wrap=sleep 1",
    )
    slurm.wait_for(lambda: "preempted" in reasons(run), "the run saves and makes room", 900)
    queue = queue_when_requeued(slurm, first_job(run))
    reached = step(run)

    slurm.wait_for(lambda: step(run) > reached, "the run goes on", 900)
    lost = slurm.nodes(first_job(run)).split(",")[-1]
    slurm.kill_node(lost)
    slurm.wait_for(lambda: record.is_done(run, ("short", "long")), "the run finishes", 1200)
    slurm.start_node(lost)
    return Story(train_without_slurm(build, folder / "unbroken"), run, nodes, queue, lost)


def queue_when_requeued(slurm: SlurmLab, job: str) -> str:
    """The queue as it is once the preempted job has left its nodes and waits again."""
    seen: list[str] = []

    def waits() -> bool:
        seen.append(queue_of(slurm))
        return f"{job} PENDING" in seen[-1]

    slurm.wait_for(waits, "the run waits in the queue", 300)
    return seen[-1]


def queue_of(slurm: SlurmLab) -> str:
    """Jobs that run or wait."""
    return slurm.run("squeue", "--noheader", "--format=%i %T %E").stdout


def train_without_slurm(build: Path, run: Path) -> Path:
    """The whole programme in one go, on this machine."""
    assert run_ranks(_train, 2, build, run) == [ExitCode.DONE] * 2
    return run


def _train(build: Path, run: Path) -> ExitCode:
    return train_here(build, RunFolder(run), torch.device("cpu"), StopRequest())


def launch(slurm: SlurmLab, build: Path, runs: Path, name: str) -> Path:
    """Launch as `shipway launch` does, against the lab; returns the run's folder."""
    with slurm.as_environment():
        prepared = prepare(build, runs, run_id=name)
        assert isinstance(prepared, Launch), prepared
        started = start(prepared)
    assert isinstance(started, Started)
    assert started.code == 0, started.output
    assert [job.stage for job in started.jobs] == ["short", "long"]
    return prepared.run.folder


def first_job(run: Path) -> str:
    return job_of(run, "01-short")


def job_of(run: Path, slug: str) -> str:
    return (run / "jobs" / slug).read_text().split()[0]


def step(run: Path) -> int:
    progress = record.read_progress(run)
    return progress.step if progress else 0


def reasons(run: Path) -> list[str]:
    return [attempt.reason for attempt in record.read_attempts(run)]


def made(run: Path) -> list[tuple[int, float]]:
    """Step and loss of every step, also of those that were made again."""
    entries = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [(entry["step"], entry["loss"]) for entry in entries if "loss" in entry]


def test_a_stage_trains_over_two_nodes(story: Story) -> None:
    assert len(story.nodes.split(",")) == 2
    assert {"rank0.json", "rank1.json"} <= {path.name for path in (story.troubled / "attempts/1").iterdir()}


def test_a_preempted_run_waits_in_the_queue_with_its_chain_behind_it(story: Story) -> None:
    job, following = first_job(story.troubled), job_of(story.troubled, "02-long")
    assert f"{job} PENDING" in story.queue_after_preemption
    assert f"{following} PENDING afterok:{job}" in story.queue_after_preemption


def test_a_run_outlives_preemption_and_the_loss_of_a_node(story: Story) -> None:
    attempts = record.read_attempts(story.troubled)
    reasons = [(a.stage, a.reason) for a in attempts]
    assert reasons[:1] + reasons[2:] == [("short", "preempted"), ("short", "done"), ("long", "done")]
    assert reasons[1] in (("short", "retryable"), ("short", "lost")), "the script may go with its node"
    assert story.lost_node not in attempts[2].nodes
    assert set(read_excluded(story.troubled)) <= {story.lost_node}, "no other node is blamed"


def test_no_secret_of_the_submitters_environment_was_written(story: Story) -> None:
    assert files_with(SECRET, story.troubled.parent.parent) == []


def test_a_troubled_run_ends_with_the_loss_of_the_unbroken_one(story: Story) -> None:
    assert len(made(story.unbroken)) == 31
    assert dict(made(story.troubled)) == dict(made(story.unbroken))


def test_a_job_that_cannot_be_satisfied_is_refused_at_submission(slurm: SlurmLab, tmp_path: Path) -> None:
    build = built(tmp_path / "build", "tiny", *SLURM, "+cluster.target.spare_nodes=6")
    with slurm.as_environment():
        prepared = prepare(build, tmp_path / "runs", run_id="large")
        assert isinstance(prepared, Launch)
        started = start(prepared)
    assert isinstance(started, Started)
    assert started.code == 4
    assert "node configuration is not available" in started.output


@pytest.fixture(scope="module")
def stopped(slurm: SlurmLab, story: Story, tmp_path_factory: pytest.TempPathFactory) -> Stopped:
    """A run on nodes of which one is bad, stopped and resumed by its user, and then dropped."""
    folder = tmp_path_factory.mktemp("stopped")
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("SHIPWAY_PYTHON", str(python_that_dies_on("n1", folder)))
        run = launch(slurm, story.troubled.parent.parent / "build", folder / "runs", "bad-node")
        first, last = first_job(run), job_of(run, "02-long")
        slurm.wait_for(lambda: first_job(run) != first, "another job takes over", 900)
        second = first_job(run)
        described = slurm.run("scontrol", "show", "job", second).stdout
        follows = ("squeue", "--noheader", f"--jobs={last}", "--format=%E")
        slurm.wait_for(lambda: f"afterok:{second}" in slurm.run(*follows).stdout, "the chain follows")

        slurm.wait_for(lambda: step(run) >= 2, "the run trains", 900)
        shipway_there(slurm, "stop", run)
        slurm.wait_for(lambda: reasons(run)[1:] == ["stopped"], "the run saves and ends", 900)
        slurm.wait_for(lambda: not queue_of(slurm), "its jobs leave the queue", 300)
        reached = step(run)
        shipway_there(slurm, "resume", run)
    slurm.wait_for(lambda: step(run) > reached, "the resumed run goes on", 900)
    resumed = slurm.nodes(first_job(run))
    shipway_there(slurm, "stop", run)
    return Stopped(run, described, resumed, reached)


def shipway_there(slurm: SlurmLab, command: str, run: Path) -> None:
    """A command on a run, as its user gives it."""
    with slurm.as_environment():
        assert shipway([command, run.name, "--runs", str(run.parent), "--quiet"]) == 0


def test_a_node_that_fails_the_pre_flight_is_left_out(stopped: Stopped) -> None:
    """The job that Slurm gave a bad node submits another without it, and moves the chain behind that."""
    assert "ExcNodeList=n1" in stopped.second_job
    assert reasons(stopped.run)[0] == "preflight"
    assert read_excluded(stopped.run) == ("n1",)


def test_a_run_that_is_stopped_saves_first_and_is_resumed_where_it_was(
    story: Story, stopped: Stopped
) -> None:
    """At the step after the one that it saved at, off the bad node, with the losses of the unbroken run."""
    before = record.read_attempts(stopped.run)[1]
    assert (before.reason, before.exit_code) == ("stopped", 75)
    assert "n1" not in stopped.nodes_when_resumed.split(",")
    steps = made(stopped.run)[: stopped.at_step + 1]
    assert steps == made(story.unbroken)[: stopped.at_step + 1]


def python_that_dies_on(node: str, folder: Path) -> Path:
    """A Python whose pre-flight gives no answer on one node."""
    wrapper = folder / "python"
    dies = f'[ "$SLURMD_NODENAME" = {node} ] && [ -n "${{SLURM_STEP_ID:-}}" ] && exit 1'
    wrapper.write_text(f'#!/bin/sh\n{dies}\nexec {sys.executable} "$@"\n')
    wrapper.chmod(0o755)
    return wrapper
