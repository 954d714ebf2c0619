"""What `generate` and `export` share: which checkpoint is meant, and running the runtime on it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli import exit_codes
from shipway.compiler.cli.output import Output

Source = Annotated[
    Path,
    typer.Argument(metavar="BUILD|RUN", help="A build folder, or the folder of a run.", show_default=False),
]
Checkpoint = Annotated[
    Path | None,
    typer.Option(
        "--checkpoint",
        metavar="FOLDER",
        help="A checkpoint; if not given, the newest of the run, or of the build's newest run.",
        show_default=False,
    ),
]
Weights = Annotated[
    str | None,
    typer.Option(
        "--weights",
        metavar="average|last",
        help="Their moving average (training.ema), or those after the last step; if not given, the average"
        " where there is one.",
        show_default=False,
    ),
]
Runs = Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of the runs.")]


def require_build(folder: Path, output: Output) -> Path:
    """`folder` if it is a build folder, or leave with what to do."""
    if not (folder / "model.py").exists():
        summary = f"{folder} is neither a build folder nor the folder of a run"
        help_text = "Write one with `shipway build BLUEPRINT`, train it with `shipway launch FOLDER`."
        output.refuse("EN002", summary, exit_codes.ENVIRONMENT, help_text=help_text)
    return folder


def find_checkpoint(source: Path, checkpoint: Path | None, runs: Path, output: Output) -> tuple[Path, Path]:
    """The build folder, and a checkpoint or a folder of checkpoints.

    Of a build: those of its newest run with a finished checkpoint; runs passed over are told.
    """
    from shipway.compiler.launch.record import all_runs, newest_checkpoint, read_record

    record = read_record(source)
    build = require_build(source if record is None else Path(record.build), output)
    if checkpoint is not None:
        if not checkpoint.is_dir():
            what = "is no folder" if checkpoint.exists() else "does not exist"
            output.refuse("CL001", f"--checkpoint: {checkpoint} {what}", exit_codes.INVALID)
        return build, checkpoint
    if record is not None:
        return build, source / "checkpoints"
    whole = build.resolve()
    mine = [run.folder for run, entry in all_runs(runs) if Path(entry.build) == whole]
    found = next((folder for folder in mine if newest_checkpoint(folder)), None)
    if found is None:
        summary = f"no run of {build} in {runs} has a finished checkpoint"
        help_text = f"Train it with `shipway launch {build}`, or name a folder with --checkpoint."
        output.refuse("EN001", summary, exit_codes.ENVIRONMENT, help_text=help_text)
    if found != mine[0]:
        output.note(f"the newest run, {mine[0]}, has no finished checkpoint yet: falling back to {found}")
    return build, found / "checkpoints"


def check_weights(weights: str, output: Output) -> str:
    """`weights` if there is such a kind, or leave."""
    if weights not in ("average", "last"):
        output.refuse("CL001", f"--weights {weights}: must be average or last", exit_codes.INVALID)
    return weights


def run_runtime(module: str, arguments: Sequence[str]) -> None:
    """Run a module of the runtime in a process of its own, and leave as it does when it fails."""
    import subprocess
    import sys

    finished = subprocess.run([sys.executable, "-m", f"shipway.runtime.{module}", *arguments])
    if finished.returncode:
        raise typer.Exit(finished.returncode)
