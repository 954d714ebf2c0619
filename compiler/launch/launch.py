"""Launching a build folder: check it, choose or make its run, and start the target's commands."""

from __future__ import annotations

import os
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from shipway.compiler.launch import environment, record
from shipway.compiler.launch.intact import edited_files, missing_files
from shipway.compiler.launch.job import Programme, programme
from shipway.compiler.launch.target import Command, Run, Target
from shipway.compiler.launch.targets import target_named
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.plan import Plan, content_hash
from shipway.schemas.run import Job, RunRecord

ENVIRONMENT_CODE = 4
STALE_CODE = 5


@dataclass(frozen=True)
class Launch:
    """A run that is ready to start."""

    plan: Plan
    programme: Programme
    target: Target
    run: Run
    continues: bool
    """Whether the run's folder was there already."""
    warnings: tuple[Diagnostic, ...] = ()
    """What is unusual about the build folder, and may be meant."""

    @property
    def commands(self) -> list[Command]:
        """What starts it."""
        return self.target.submit(self.programme, self.run)


@dataclass(frozen=True)
class Refusal:
    """Why nothing was started."""

    code: int
    """Exit code: 4 environment, 5 stale plan."""
    diagnostics: list[Diagnostic]


def prepare(
    build: Path, runs: Path = Path("runs"), *, new: bool = False, run_id: str | None = None
) -> Launch | Refusal:
    """What can be known before starting: the plan is whole, the target can take it, the run is chosen.

    Launching the same build again continues its newest unfinished run, unless `new`; `run_id` names one.
    """
    plan = read_plan(build)
    if isinstance(plan, Refusal):
        return plan
    jobs = programme(plan)
    target = target_named(jobs.cluster.target.kind)
    gone = missing_files(build, jobs.regenerate)
    problems = [*gone, *_environment_problems(jobs), *target.check(jobs, build)]
    run, continues = _choose_run(plan, build.resolve(), runs.resolve(), new, run_id)
    prepared = Launch(plan, jobs, target, run, continues, tuple(edited_files(build)))
    return Refusal(ENVIRONMENT_CODE, problems) if problems else prepared


def dry_run(build: Path, runs: Path = Path("runs"), *, new: bool = False) -> Launch | Refusal:
    """As `prepare`, without what depends on this machine: it shows what a login node would run."""
    plan = read_plan(build)
    if isinstance(plan, Refusal):
        return plan
    jobs = programme(plan)
    if problems := [*missing_files(build, jobs.regenerate), *_environment_problems(jobs)]:
        return Refusal(ENVIRONMENT_CODE, problems)
    run, continues = _choose_run(plan, build.resolve(), runs.resolve(), new, None)
    target = target_named(jobs.cluster.target.kind)
    return Launch(plan, jobs, target, run, continues, tuple(edited_files(build)))


@dataclass(frozen=True)
class Started:
    """What became of the commands."""

    code: int
    """0, the environment's code when a command failed, or what a foreground run left with."""
    output: str
    """What the commands printed."""
    jobs: tuple[Job, ...] = ()


def start(launch: Launch) -> Started:
    """Write the record, run the commands, and note the jobs that they name."""
    folder = launch.run.folder
    folder.mkdir(parents=True, exist_ok=True)
    record.lift_halt(folder)
    plan_copy = folder / "plan.json"
    plan_copy.write_text((launch.run.build / "plan.json").read_text())
    entry = RunRecord(
        id=launch.run.id,
        name=launch.plan.name,
        plan_hash=launch.plan.hash,
        target=launch.programme.cluster.target.kind,
        build=str(launch.run.build),
        launched_at=record.now(),
    )
    record.write_record(folder, entry)
    output = ""
    for command in launch.commands:
        code, text = execute(command)
        output += text
        if code != 0:
            return Started(code if command.foreground else ENVIRONMENT_CODE, output)
    jobs = launch.target.submitted(launch.programme, output)
    if jobs:
        record.write_record(folder, entry.model_copy(update={"jobs": jobs}))
    return Started(0, output, jobs)


def execute(command: Command) -> tuple[int, str]:
    """Run a command; returns its code and what it printed, which is shown only when it failed.

    A foreground command gets the terminal.
    """
    merged = {**os.environ, **command.environment}
    if command.foreground:
        return _in_foreground(command.arguments, merged), ""
    done = subprocess.run(
        command.arguments, env=merged, input=command.stdin, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def _in_foreground(arguments: tuple[str, ...], merged: dict[str, str]) -> int:
    """Wait for a command that may be saving: Ctrl-C reaches it from the terminal, TERM is passed on."""
    process = subprocess.Popen(arguments, env=merged)
    before = signal.signal(signal.SIGTERM, lambda number, frame: process.send_signal(number))
    try:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue
    finally:
        signal.signal(signal.SIGTERM, before)


def read_plan(build: Path) -> Plan | Refusal:
    """The plan of a build folder, if it is whole and has not been edited."""
    path = build / "plan.json"
    try:
        plan = Plan.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return Refusal(
            ENVIRONMENT_CODE,
            [
                Diagnostic(
                    code="LA001",
                    summary=f"{build} is not a build folder: it has no plan.json",
                    help="shipway build BLUEPRINT writes one",
                )
            ],
        )
    except ValidationError as error:
        first = error.errors()[0]
        return Refusal(
            STALE_CODE,
            [
                Diagnostic(
                    code="LA002",
                    summary=f"{path} is not a plan of this version of Shipway",
                    because=(f"{'.'.join(map(str, first['loc']))}: {first['msg']}",),
                    help="plan and build again",
                )
            ],
        )
    if content_hash(plan, without="hash") != plan.hash:
        edited = Diagnostic(
            code="LA003",
            summary=f"{path} was edited after it was planned: its hash no longer fits",
            help="change the blueprint instead, then plan and build again",
        )
        return Refusal(STALE_CODE, [edited])
    return plan


def _environment_problems(jobs: Programme) -> list[Diagnostic]:
    return [
        Diagnostic(
            code="LA004",
            summary=f"the variable {name} may not stand in a blueprint",
            field=f"cluster.target.environment.{name}",
            because=(f"it {reason}",),
            help="leave it out; secrets reach the workers through the scheduler's own means",
        )
        for name, reason in environment.refused(jobs)
    ]


def _choose_run(plan: Plan, build: Path, runs: Path, new: bool, run_id: str | None) -> tuple[Run, bool]:
    if run_id is not None:
        folder = runs / run_id
        return Run(folder, build), folder.exists()
    stages = tuple(stage.name for stage in plan.stages)
    if not new:
        for run, entry in record.all_runs(runs):
            same = entry.plan_hash == plan.hash and Path(entry.build) == build
            if same and not record.is_done(run.folder, stages):
                return run, True
    return Run(runs / record.new_run_id(plan.name, runs), build), False
