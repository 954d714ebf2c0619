"""Starting a run that is ready, and saying what became of it: the end of `launch` and of `resume`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.launch import Launch

Wait = Annotated[
    bool,
    typer.Option(
        "--wait", help="Stay until the run ends; bring it back without nodes that failed its pre-flight."
    ),
]


def start_run(ready: Launch, output: Output, *, wait: bool) -> NoReturn:
    """Start, tell, with `wait` stay with it, and leave with the code."""
    import shlex

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch import launch as launching
    from shipway.compiler.launch.attend import attend, describe

    run: dict[str, object] = {"run": ready.run.id, "folder": str(ready.run.folder)}
    started = launching.start(ready, quiet_stdout=output.as_json)
    if isinstance(started, launching.Refusal):
        output.fail(started.diagnostics, started.code)
    output.warn(started.warnings)
    if told := describe(started):
        output.note(told)
    code = started.code
    if code == exit_codes.ENVIRONMENT and not started.jobs:
        output.note(f"nothing runs; ask the cluster why: shipway doctor {shlex.quote(str(ready.run.build))}")
    if wait and code == 0 and started.jobs:
        ended = attend(ready, output.note)
        if isinstance(ended, launching.Refusal):
            output.fail(ended.diagnostics, ended.code)
        code = 0 if ended.state == "done" else exit_codes.ENVIRONMENT
        run["state"] = ended.state
        output.note(f"{ready.run.id}: {ended.state}" + (f" ({ended.detail})" if ended.detail else ""))
    elif started.jobs:
        output.note(f"watch it with `shipway status {ready.run.id}`")
    jobs = [job.model_dump() for job in started.jobs]
    output.data(
        {**run, "continues": ready.continues, "jobs": jobs, "left_out": started.left_out, "status": code}
    )
    raise typer.Exit(code)
