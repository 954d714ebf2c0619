"""shipway export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json
from shipway.compiler.cli.trained import Checkpoint, Runs, Source

NO_ARGUMENTS_IS_HELP = True


def command(
    source: Source,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to write.", show_default=False)
    ],
    checkpoint: Checkpoint = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="Number format of the weights.")] = "bf16",
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as safetensors with a config.json, under published names."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.trained import find_checkpoint, run_runtime

    build, checkpoints = find_checkpoint(source, checkpoint, runs, Output(as_json=json))
    arguments = ["export", str(build), str(checkpoints), str(out), "--dtype", dtype]
    run_runtime("interchange", [*arguments, *(["--json"] if json else [])])
