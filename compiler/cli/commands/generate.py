"""shipway generate

The work is the runtime's, in a process of its own: the compiler imports no torch.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import Json

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output

NO_ARGUMENTS_IS_HELP = True


def command(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="BUILD|RUN", help="A build folder, or the folder of a run.", show_default=False
        ),
    ],
    prompt: Annotated[
        list[str],
        typer.Option(
            "--prompt", "-p", help="Text to continue; may be given several times.", show_default=False
        ),
    ],
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER",
            help="A checkpoint; if not given, the newest of the run, or of the build's newest run.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Most tokens to generate.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0 takes the likeliest token.")] = 0.8,
    top_p: Annotated[
        float, typer.Option(min=0, max=1, help="Draw from the likeliest tokens that hold this share.")
    ] = 0.95,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same text.")] = 0,
    device: Annotated[
        str | None,
        typer.Option(metavar="cpu|cuda", help="By default cuda where there is one.", show_default=False),
    ] = None,
    runs: Annotated[Path, typer.Option("--runs", metavar="DIR", help="Folder of the runs.")] = Path("runs"),
    json: Json = False,
) -> None:
    """Continue a prompt with a trained model, from a checkpoint."""
    import subprocess
    import sys

    from shipway.compiler.cli.output import Output

    build, checkpoints = _find(source, checkpoint, runs, Output(as_json=json))
    arguments = [str(build), str(checkpoints), "--tokens", str(tokens), "--temperature", str(temperature)]
    arguments += ["--top-p", str(top_p), "--seed", str(seed), *(f"--prompt={text}" for text in prompt)]
    arguments += ["--device", device] if device is not None else []
    arguments += ["--json"] if json else []
    finished = subprocess.run([sys.executable, "-m", "shipway.runtime.generation", *arguments])
    if finished.returncode:
        raise typer.Exit(finished.returncode)


def _find(source: Path, checkpoint: Path | None, runs: Path, output: Output) -> tuple[Path, Path]:
    """The build folder, and a checkpoint or a folder of checkpoints."""
    from shipway.compiler.cli import exit_codes
    from shipway.compiler.launch.record import all_runs, read_record

    record = read_record(source)
    build = source if record is None else Path(record.build)
    if not (build / "model.py").exists():
        summary = f"{build} is neither a build folder nor the folder of a run"
        help_text = "Write one with `shipway build BLUEPRINT`, train it with `shipway launch FOLDER`."
        output.refuse("EN002", summary, exit_codes.ENVIRONMENT, help_text=help_text)
    if checkpoint is not None:
        return build, checkpoint
    if record is not None:
        return build, source / "checkpoints"
    mine = (
        run.folder / "checkpoints" for run, entry in all_runs(runs) if Path(entry.build) == build.resolve()
    )
    found = next((folder for folder in mine if any(folder.glob("step-*"))), None)
    if found is None:
        summary = f"no run of {build} in {runs} has a checkpoint"
        help_text = f"Train it with `shipway launch {build}`, or name a folder with --checkpoint."
        output.refuse("EN001", summary, exit_codes.ENVIRONMENT, help_text=help_text)
    return build, found
