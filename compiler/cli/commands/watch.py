"""shipway watch"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json

ASK_SECONDS = 5.0
"""A scheduler is asked no more often than this, however often files are looked at."""


def command(
    name: RunName = None,
    once: Annotated[bool, typer.Option("--once", help="Print once and leave.")] = False,
    every: Annotated[
        float, typer.Option("--every", metavar="SECONDS", min=0.1, help="Time between two looks.")
    ] = 1.0,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Follow a run: loss, speed and memory against the plan, expert load, stalls, last checkpoint."""
    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.runs import status
    from shipway.compiler.render.watch import panel
    from shipway.compiler.watch import snapshot, strict

    output = Output(as_json=json)
    found = find_run(name, runs, output)

    asked: dict[str, object] = {}

    def look(ask: bool = True) -> dict[str, object]:
        if ask:
            state = status(found)
            asked.update(state=state.state, reason=state.detail)
        return snapshot(found.run.folder) | asked

    if json:
        output.data(strict(look()))
        return
    console = output.console
    if once or not console.is_terminal:
        output.show(panel(look()))
        return
    import time

    from rich.live import Live

    with Live(console=console, auto_refresh=False, transient=False) as live:
        told = 0.0
        while True:
            ask = time.monotonic() - told > ASK_SECONDS
            told = time.monotonic() if ask else told
            seen = look(ask)
            live.update(panel(seen), refresh=True)
            if seen["state"] not in ("running", "waiting"):
                return
            time.sleep(every)
