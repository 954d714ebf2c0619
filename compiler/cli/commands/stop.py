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
    from shipway.compiler.launch.execute import execute
    from shipway.compiler.launch.runs import is_forgotten

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output, several="refuse")
    commands = found.target.cancel(found.record, found.run)
    try:
        record.halt(found.run.folder)  # before the signal, so that nothing is brought back in between
    except OSError as error:
        reason = (error.strerror or "error").lower()
        summary = f"{found.run.folder} cannot be written: {reason}"
        output.refuse(
            "LA007", summary, exit_codes.ENVIRONMENT, help_text="Stop it from where it was launched."
        )
    failed = ""
    for each in commands:
        code, text = execute(each)
        failed = text if code and not is_forgotten(text) else failed
    output.data({"run": found.record.id, "told": bool(commands) and not failed})
    if failed:
        output.note(failed.rstrip())
        raise typer.Exit(exit_codes.ENVIRONMENT)
    words = "told to save and leave" if commands else "not running; it will not be started again"
    output.show(f"{found.record.id}: {words}")
