"""shipway build"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import ConfigDir, Json, Overrides, Quiet


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="PLAN|BLUEPRINT", help="A plan file, or a blueprint to plan first.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            metavar="FOLDER",
            help="Folder to write, build/NAME if not given.",
            show_default=False,
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that you have edited.")] = False,
    config_dir: ConfigDir = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a build folder: the plan, the generated model, launch scripts, container."""
    from shipway.compiler.cli.building import build_source
    from shipway.compiler.cli.output import Output

    output = Output(as_json=json, quiet=quiet)
    built = build_source(source, overrides, config_dir, out, force, output)
    output.data(
        {
            "folder": str(built.folder),
            "plan_hash": built.plan.hash,
            "written": [str(file) for file in built.written],
            "unchanged": [str(file) for file in built.unchanged],
        }
    )
    for file in built.written:
        output.show(f"  {file}")
    unchanged = f", {len(built.unchanged)} unchanged" if built.unchanged else ""
    output.show(
        f"[bold green]✓[/] {built.folder}: {len(built.written)} files written{unchanged}, "
        f"from plan {built.plan.hash.removeprefix('sha256:')[:12]}"
    )
