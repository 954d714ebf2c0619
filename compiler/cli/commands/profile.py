"""shipway profile"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json, Quiet


def command(
    name: RunName = None,
    steps: Annotated[int, typer.Option(min=1, max=100, help="Optimizer steps to profile.")] = 3,
    memory: Annotated[
        bool, typer.Option("--memory", help="Allocations too, and on GPUs a snapshot of the allocator.")
    ] = False,
    runs: Runs = Path("runs"),
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Ask a running run for traces of its next steps, for Perfetto, with communication by axis."""
    from json import dumps

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.runs import status

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output, several="note")
    state = status(found).state
    if state != "running":
        help_text = "`shipway launch` or `shipway resume` starts it."
        if state == "done":
            help_text = (
                "All its stages are trained; `shipway launch BUILD --new` starts another run of its build."
            )
        output.refuse("LA065", f"{found.record.id} is {state}", exit_codes.ENVIRONMENT, help_text=help_text)
    folder = found.run.folder
    request = folder / "profile.request"
    output.write(request, dumps({"steps": steps, "memory": memory}) + "\n")
    output.data({"run": found.record.id, "request": str(request), "folder": str(folder / "profiles")})
    output.show(f"asked; traces will be in {folder / 'profiles'}, the summary in `shipway watch`")
