"""shipway import"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json

NO_ARGUMENTS_IS_HELP = True


def command(
    build: Annotated[
        Path,
        typer.Argument(metavar="BUILD", help="Build folder of the same model.", show_default=False),
    ],
    published: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER", help="Folder with config.json and safetensors files.", show_default=False
        ),
    ],
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Checkpoint to write.", show_default=False)
    ],
    json: Json = False,
) -> None:
    """Read published weights into a checkpoint that `generate --checkpoint` takes."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.trained import require_build, run_runtime

    arguments = ["import", str(require_build(build, Output(as_json=json))), str(published), str(out)]
    run_runtime("interchange", [*arguments, *(["--json"] if json else [])])
