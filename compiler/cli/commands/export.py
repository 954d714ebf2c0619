"""shipway export"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json
from shipway.compiler.cli.trained import Checkpoint, Runs, Source, Weights

NO_ARGUMENTS_IS_HELP = True


def command(
    source: Source,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder to write.", show_default=False)
    ],
    checkpoint: Checkpoint = None,
    dtype: Annotated[str, typer.Option(metavar="bf16|fp32", help="Number format of the weights.")] = "bf16",
    weights: Weights = None,
    runs: Runs = Path("runs"),
    json: Json = False,
) -> None:
    """Write a checkpoint's weights as safetensors with a config.json, under published names."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.trained import check_weights, find_checkpoint, run_runtime

    output = Output(as_json=json)
    build, checkpoints = find_checkpoint(source, checkpoint, runs, output)
    arguments = ["export", str(build), str(checkpoints), str(out), "--dtype", dtype]
    arguments += ["--weights", check_weights(weights, output)] if weights is not None else []
    run_runtime("interchange", [*arguments, *(["--json"] if json else [])])
