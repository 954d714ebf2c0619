"""The run that a command is about."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.runs import Found
    from shipway.compiler.launch.target import State


def _complete_run(incomplete: str) -> list[str]:
    return [path.name for path in Path("runs").glob(f"{incomplete}*") if (path / "run.json").is_file()]


RunName = Annotated[
    str | None,
    typer.Argument(
        metavar="[RUN]",
        help="Name or folder of a run; the newest if not given.",
        autocompletion=_complete_run,
        show_default=False,
    ),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of the runs.")]


def find_run(
    name: str | None, runs: Path, output: Output, *, several: Literal["note", "refuse"] | None = None
) -> Found:
    """The run, or leave with what there is instead.

    Without a name it is the newest; `several` says what to do then where more than one is running.
    """
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.runs import find

    found = find(runs, name)
    if found is not None:
        if name is None and several is not None:
            _tell_of_several(found, runs, output, refuse=several == "refuse")
        return found
    refuse_unreadable([Path(name), runs / name] if name else sorted(runs.glob("*/")), output)
    known = sorted(path.parent.name for path in runs.glob("*/run.json"))
    summary = f"there is no run {name!r}" if name else f"there is no run in {runs}"
    names = f"Runs here: {', '.join(known[-5:])}." if known else "`shipway launch FOLDER` starts one."
    output.refuse("LA060", summary, exit_codes.ENVIRONMENT, file=str(runs), help_text=names)


def _tell_of_several(found: Found, runs: Path, output: Output, *, refuse: bool) -> None:
    """Where more than one run is running, say which one is taken, or leave: a name is needed."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.runs import running

    names = [each.record.id for each in running(runs)]
    if len(names) < 2:
        return
    if refuse:
        help_text = f"Name one of them: {', '.join(names)}."
        output.refuse("CL001", f"{len(names)} runs are running", exit_codes.INVALID, help_text=help_text)
    output.note(f"{len(names)} runs are running ({', '.join(names)}): this is {found.record.id}")


def refuse_unreadable(folders: Sequence[Path], output: Output) -> None:
    """Leave when a folder is a run's, but its record cannot be read."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.record import unreadable
    from shipway.schemas.run import RECORD_FILE

    for folder in folders:
        if reason := unreadable(folder):
            path = folder / RECORD_FILE
            output.refuse(
                "LA063",
                f"{path} cannot be read: {reason}",
                exit_codes.ENVIRONMENT,
                file=str(path),
                help_text="Its files are left as they are; `shipway launch BUILD` starts another run.",
            )


def refuse_unless_at_rest(found: Found, output: Output, *, or_new: bool = False) -> State:
    """The run's state; leaves when it is running or waits for nodes. `or_new` names `--new` as a way."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.runs import status

    now = status(found)
    state = now.state
    if state not in ("running", "waiting"):
        return state
    name = found.record.id
    ways = [f"Watch it: `shipway logs -f {name}`, `shipway status {name}`."]
    ways += ["Start another run of this build: `shipway launch … --new`."] if or_new else []
    summary = f"the run {name} is {state} already"
    summary += f" ({now.detail})" if now.detail else ""
    output.refuse(
        "LA061", summary, exit_codes.ENVIRONMENT, file=str(found.run.folder), help_text=" ".join(ways)
    )
