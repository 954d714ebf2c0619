"""shipway logs"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs


def command(
    name: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written.")] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", help="Of one rank; else of all.", show_default=False),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option("--attempt", metavar="N", help="Else the newest.", show_default=False),
    ] = None,
    runs: Runs = Path("runs"),
) -> None:
    """Print what the workers wrote, each line with its rank."""
    from dataclasses import replace

    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.launch import execute
    from shipway.compiler.launch.logs import follow_lines, log_files, print_files

    output = Output()
    found = find_run(name, runs, output)
    commands = found.target.logs(found.record, found.run, follow=follow)
    if commands is not None:
        for each in commands:
            code, _ = execute(replace(each, foreground=True))
            if code:
                raise typer.Exit(code)
        return
    files = log_files(found.run.folder, attempt=attempt, rank=rank)
    if not files:
        output.note("nothing was written yet")
    if follow:
        follow_lines(found.run.folder, attempt=attempt, rank=rank)
    else:
        print_files(files)
