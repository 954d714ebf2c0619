"""shipway logs"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.logs import Line
    from shipway.compiler.launch.runs import Found

ASK_SECONDS = 5.0
"""While following, how often it is asked whether the run has ended: a scheduler is not to be pestered."""


def command(
    name: RunName = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on as lines are written.")] = False,
    rank: Annotated[
        int | None,
        typer.Option("--rank", metavar="N", help="Of one rank; else of all.", show_default=False),
    ] = None,
    attempt: Annotated[
        int | None,
        typer.Option(
            "--attempt", metavar="N", help="Else the last that wrote something.", show_default=False
        ),
    ] = None,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Print what the workers wrote, each line with its rank; with --json, each line an object."""
    import subprocess
    from json import dumps

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output

    output = Output(as_json=json)
    found = find_run(name, runs, output, several="note")
    if found.target.logs(found.record, found.run, follow=follow) is None:
        _refuse_absent(found, output, follow=follow, rank=rank, attempt=attempt)
    elif rank is not None and rank < 0:
        output.refuse("CL001", f"--rank {rank}: ranks count from 0", exit_codes.INVALID)
    try:
        nothing = True
        for line in _lines(found, follow=follow, rank=rank, attempt=attempt):
            nothing = False
            text = dumps({"rank": line.rank, "text": line.text}, ensure_ascii=False) if json else line.text
            print(text, flush=follow)
        if nothing:
            output.note("nothing was written yet")
    except subprocess.CalledProcessError as error:
        raise typer.Exit(exit_codes.ENVIRONMENT) from error
    except FileNotFoundError as error:
        output.refuse("LA064", f"there is no {error.filename} here", exit_codes.ENVIRONMENT)


def _refuse_absent(
    found: Found, output: Output, *, follow: bool, rank: int | None, attempt: int | None
) -> None:
    """Leave when the run has no such attempt or rank, unless it may still come; tell which attempt it is."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.logs import attempts, last_written, log_files, ranks

    folder, run = found.run.folder, found.record.id
    numbers = attempts(folder)
    if attempt is not None and attempt not in numbers and not (follow and attempt > max(numbers, default=0)):
        summary = f"--attempt {attempt}: {run} has no such attempt with logs of its own"
        output.refuse("CL001", summary, exit_codes.INVALID, help_text=_there_are("Attempts", numbers))
    shared = any(file.rank is None for file in log_files(folder, attempt=attempt))
    if rank is not None and not (follow and shared):  # who shares files is known once it has written
        known = ranks(folder, attempt=attempt)
        if rank < 0 or (known and rank not in known):
            summary = f"--rank {rank}: {run} has no such rank"
            output.refuse("CL001", summary, exit_codes.INVALID, help_text=_there_are("Ranks", known))
    shown = last_written(folder)
    if attempt is None and not shared and shown is not None and shown != numbers[-1]:
        output.note(f"attempt {numbers[-1]} has written nothing: this is attempt {shown}")


def _there_are(what: str, numbers: list[int]) -> str:
    return f"{what} there are: {', '.join(map(str, numbers))}." if numbers else f"{what} there are: none yet."


def _lines(found: Found, *, follow: bool, rank: int | None, attempt: int | None) -> Iterator[Line]:
    from shipway.compiler.launch.logs import command_lines, follow_lines, log_files, read_lines

    commands = found.target.logs(found.record, found.run, follow=follow)
    if commands is not None:
        for each in commands:
            yield from command_lines(each, rank)
    elif follow:
        yield from follow_lines(found.run.folder, _ended(found), attempt=attempt, rank=rank)
    else:
        yield from read_lines(log_files(found.run.folder, attempt=attempt, rank=rank))


def _ended(found: Found) -> Callable[[], bool]:
    """Whether the run has ended, asked for now and then."""
    import time

    from shipway.compiler.launch.runs import find, status

    asked_at, answer = -ASK_SECONDS, False

    def ended() -> bool:
        nonlocal asked_at, answer
        if time.monotonic() - asked_at >= ASK_SECONDS:
            again = (
                find(found.run.folder.parent, str(found.run.folder)) or found
            )  # its jobs may be others now
            state = status(again).state
            asked_at, answer = time.monotonic(), state not in ("running", "waiting", "unknown")
        return answer

    return ended
