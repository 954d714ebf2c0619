"""shipway stop"""

from __future__ import annotations

from pathlib import Path

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json, Quiet


def command(
    name: RunName = None, runs: Runs = Path("runs"), json: Json = False, quiet: Quiet = False
) -> None:
    """Let a run save and end; it stays down until `shipway resume`."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch import record
    from shipway.compiler.launch.launch import execute

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output)
    commands = found.target.cancel(found.record, found.run)
    record.halt(found.run.folder)  # before the signal, so that nothing is brought back in between
    failed = ""
    for each in commands:
        code, text = execute(each)
        failed = text if code else failed
    output.data({"run": found.record.id, "told": bool(commands) and not failed})
    if failed:
        output.note(failed.rstrip())
        raise typer.Exit(exit_codes.ENVIRONMENT)
    words = "told to save and leave" if commands else "not running; it will not be started again"
    output.show(f"{found.record.id}: {words}")
