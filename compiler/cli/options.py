"""Parameters that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def _complete_blueprint(incomplete: str) -> list[str]:
    from shipway.compiler.groups import SearchPath, our_folder

    return [name for name in SearchPath((our_folder(),)).options("") if name.startswith(incomplete)]


def _complete_override(incomplete: str) -> list[str]:
    from shipway.compiler.groups import SearchPath, our_folder

    search = SearchPath((our_folder(),))
    groups = ("model", "training", "cluster")
    choices = [f"{group}={option}" for group in groups for option in search.options(group)]
    return [choice for choice in choices if choice.startswith(incomplete)]


Name = Annotated[
    str,
    typer.Argument(
        metavar="BLUEPRINT",
        help="Name of a blueprint, or the path of its YAML file.",
        autocompletion=_complete_blueprint,
        show_default=False,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="OVERRIDE",
        help="Overrides in Hydra's syntax: cluster=h200_8 training.micro_batch=2",
        autocompletion=_complete_override,
        show_default=False,
    ),
]
ConfigDir = Annotated[
    Path | None,
    typer.Option(
        "--config-dir", metavar="DIR", help="Folder with config groups of your own.", show_default=False
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print data as JSON, alone on standard output.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print errors only.")]
CalibrationFile = Annotated[
    Path | None,
    typer.Option("--calibration", metavar="FILE", help="Figures of `shipway calibrate`.", show_default=False),
]
