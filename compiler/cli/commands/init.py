"""shipway init"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet

SCHEMA_FOLDER = Path(".shipway/schema")


def command(
    path: Annotated[Path, typer.Argument(metavar="[FILE]", help="File to write.", show_default=True)] = Path(
        "blueprint.yaml"
    ),
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file if it exists.")] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Write a commented starter blueprint, which is valid as it is."""
    import re

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.output import Output
    from shipway.compiler.json_schema import json_schema
    from shipway.compiler.starter import starter

    output = Output(as_json=json, quiet=quiet)
    if path.suffix not in (".yaml", ".yml"):
        path = path / "blueprint.yaml" if path.is_dir() else path.with_name(path.name + ".yaml")
    if path.exists() and not force:
        summary = f"{path} exists already"
        help_text = "Name another file, or overwrite it with --force."
        output.refuse("EN003", summary, exit_codes.ENVIRONMENT, help_text=help_text)
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", path.stem).lstrip("_.-") or "mine"
    text = starter(name, str(SCHEMA_FOLDER / "blueprint.json"))
    schema = path.parent / SCHEMA_FOLDER / "blueprint.json"
    from json import dumps

    schema_text = dumps(json_schema("blueprint"), indent=2, ensure_ascii=False) + "\n"
    output.write_all({path: text, schema: schema_text})
    output.data({"written": [str(path), str(schema)]})
    output.show(f"[bold green]✓[/] wrote {path}; next: shipway plan {path}")
