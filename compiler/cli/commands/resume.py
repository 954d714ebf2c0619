"""shipway resume"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json, Quiet


def command(
    name: RunName = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NODE,…", help="Nodes to stay off.", show_default=False),
    ] = None,
    runs: Runs = Path("runs"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start a stopped or failed run again, from its last checkpoint."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.finding import find_run, refuse_unless_at_rest
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch import excluded
    from shipway.compiler.launch import launch as launching

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output)
    refuse_unless_at_rest(found, output)
    folder = found.run.folder
    ready = launching.prepare(found.run.build, folder.parent, run_id=folder.name)
    if isinstance(ready, launching.Refusal):
        output.fail(ready.diagnostics, ready.code)
    output.warn(ready.warnings)
    if ready.plan.hash != found.record.plan_hash:
        output.refuse(
            "LA062",
            f"{found.run.build} holds another plan than the one this run was launched with",
            exit_codes.STALE,
            help_text="Build that plan again, or start a new run with `shipway launch --new`.",
        )
    if exclude:
        excluded.exclude(folder, exclude.replace(",", " ").split())
    output.note(f"continuing run {ready.run.id} in {ready.run.folder}")
    started = launching.start(ready, quiet_stdout=json)
    if isinstance(started, launching.Refusal):
        output.fail(started.diagnostics, started.code)
    output.data(
        {"run": ready.run.id, "jobs": [job.model_dump() for job in started.jobs], "status": started.code}
    )
    if started.output:
        output.note(started.output.rstrip())
    raise typer.Exit(started.code)
