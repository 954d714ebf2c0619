"""shipway resume"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json, Quiet
from shipway.compiler.cli.starting import Wait, start_run


def command(
    name: RunName = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NODE,…", help="Nodes to stay off.", show_default=False),
    ] = None,
    wait: Wait = False,
    runs: Runs = Path("runs"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Start a stopped or failed run again, from its last checkpoint, without nodes that failed it."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.finding import find_run, refuse_unless_at_rest
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch import excluded
    from shipway.compiler.launch import launch as launching

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output)
    at_rest = refuse_unless_at_rest(found, output)
    folder = found.run.folder
    if at_rest == "done":
        run: dict[str, object] = {"run": found.record.id, "folder": str(folder), "state": at_rest}
        output.data({**run, "continues": True, "jobs": [], "left_out": [], "status": 0})
        output.note(f"{found.record.id} is done: all its stages are trained, and there is nothing to resume")
        return
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
    if nodes := (exclude or "").replace(",", " ").split():
        if cannot := ready.target.keeps(nodes):
            output.fail([cannot], exit_codes.ENVIRONMENT)
        excluded.exclude(folder, nodes)
    output.note(f"continuing run {ready.run.id} in {ready.run.folder}")
    start_run(ready, output, wait=wait)
