"""Launching a build folder: check it, choose or make its run, and start the target's commands."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from shipway.compiler.frozen import frozen
from shipway.compiler.launch import environment, record
from shipway.compiler.launch.excluded import accused, exclude
from shipway.compiler.launch.execute import execute
from shipway.compiler.launch.held import Busy, held
from shipway.compiler.launch.intact import edited_files, missing_files
from shipway.compiler.launch.job import Programme, programme
from shipway.compiler.launch.target import Command, Run, Target
from shipway.compiler.launch.targets import target_named
from shipway.compiler.writing import write_file
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.plan import Plan, content_hash
from shipway.schemas.run import Job, RunRecord

ENVIRONMENT_CODE = 4
STALE_CODE = 5


@frozen
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


@frozen
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


@frozen
class Started:
    """What became of the commands."""

    code: int
    """0, the environment's code when a command failed, or what a foreground run left with."""
    output: str
    """What the commands printed."""
    jobs: tuple[Job, ...] = ()
    left_out: tuple[str, ...] = ()
    """Nodes that failed the launch before, and that this one stays off."""
    warnings: tuple[Diagnostic, ...] = ()
    """Nodes that failed it, and that it cannot be kept off."""


def start(launch: Launch, *, quiet_stdout: bool = False) -> Started | Refusal:
    """Write the record, run the commands, and note the jobs that they name.

    Two launches of one run at once: the second is refused. `quiet_stdout` sends what a foreground command
    prints to standard error, where standard output is for data.
    """
    folder = launch.run.folder
    try:
        with held(folder, fresh=not launch.continues):
            return _start(launch, quiet_stdout)
    except Busy:
        summary = f"the run {launch.run.id} is being launched by another process"
        help_text = f"Watch it: `shipway status {launch.run.id}`."
        found = Diagnostic(code="LA061", summary=summary, help=help_text)
    except OSError as error:
        reason = (error.strerror or "error").lower()
        where = error.filename or folder
        help_text = "Name a folder that can be written with --runs DIR."
        found = Diagnostic(code="LA007", summary=f"{where} cannot be written: {reason}", help=help_text)
    return Refusal(ENVIRONMENT_CODE, [found])


def _start(launch: Launch, quiet_stdout: bool) -> Started:
    folder = launch.run.folder
    record.lift_halt(folder)
    left_out, warnings = _leave_out_bad_nodes(launch)
    entry = _note(launch)
    output = ""
    for command in launch.commands:
        code, text = execute(command, quiet_stdout=quiet_stdout)
        output += text
        if code != 0:
            code = code if command.foreground else ENVIRONMENT_CODE
            return Started(code, output, (), left_out, warnings)
    jobs = launch.target.submitted(launch.programme, output)
    if jobs:
        record.write_record(folder, entry.model_copy(update={"jobs": jobs}))
    return Started(0, output, jobs, left_out, warnings)


def _note(launch: Launch) -> RunRecord:
    """Write what the run is; raises OSError where that is not possible, and then no new folder stays."""
    folder = launch.run.folder
    entry = RunRecord(
        id=launch.run.id,
        name=launch.plan.name,
        plan_hash=launch.plan.hash,
        target=launch.programme.cluster.target.kind,
        build=str(launch.run.build),
        launched_at=record.now(),
        launches=launch.run.launch,
    )
    try:
        write_file(folder / "plan.json", (launch.run.build / "plan.json").read_text())
        record.write_record(folder, entry)
    except OSError:
        if not launch.continues:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    return entry


def _leave_out_bad_nodes(launch: Launch) -> tuple[tuple[str, ...], tuple[Diagnostic, ...]]:
    """Nodes to stay off since they failed the launch before; a warning instead where that cannot be said."""
    before = record.read_record(launch.run.folder) if launch.continues else None
    nodes = accused(launch.target, before) if before else ()
    if not nodes:
        return (), ()
    if cannot := launch.target.keeps(nodes):
        return (), (cannot.model_copy(update={"severity": "warning"}),)
    exclude(launch.run.folder, nodes)
    return nodes, ()


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
                    help=f"build again: shipway build BLUEPRINT --out {shlex.quote(str(build))} --force",
                )
            ],
        )
    if content_hash(plan, without="hash") != plan.hash:
        edited = Diagnostic(
            code="LA003",
            summary=f"{path} was edited after it was planned: its hash no longer fits",
            help="change the blueprint instead, then build again: shipway build BLUEPRINT"
            f" --out {shlex.quote(str(build))} --force",
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
        before = record.read_record(runs / run_id)
        launch = before.launches + 1 if before else 1
        return Run(runs / run_id, build, launch), (runs / run_id).exists()
    stages = tuple(stage.name for stage in plan.stages)
    if not new:
        for run, entry in record.all_runs(runs):
            same = entry.plan_hash == plan.hash and Path(entry.build) == build
            if same and not record.is_done(run.folder, stages):
                return replace(run, launch=entry.launches + 1), True
    return Run(runs / record.new_run_id(plan.name, runs), build), False
