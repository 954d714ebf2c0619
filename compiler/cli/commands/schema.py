"""shipway schema"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet


def command(
    group: Annotated[
        str, typer.Argument(metavar="[GROUP]", help="blueprint, model, training, cluster or device.")
    ] = "blueprint",
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", metavar="FOLDER", help="Write all of them to a folder.", show_default=False
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Print the JSON Schema that editors complete and check blueprints by."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.json_schema import GROUPS, json_schema
    from shipway.compiler.suggest import did_you_mean
    from shipway.schemas.diagnostics import Diagnostic

    output = Output(as_json=json, quiet=quiet)
    if group not in GROUPS:
        summary = f"there is no schema named `{group}`"
        help_text = did_you_mean(group, GROUPS)
        output.fail([Diagnostic(code="CL002", summary=summary, legal=GROUPS, help=help_text)])
    if out is None:
        output.text(_text(json_schema(group)))
        return
    written = []
    for name in GROUPS:
        path = out / f"{name}.json"
        output.write(path, _text(json_schema(name)))
        written.append(str(path))
    output.data({"written": written})
    output.show(*written)


def _text(schema: dict[str, object]) -> str:
    from json import dumps

    return dumps(schema, indent=2, ensure_ascii=False) + "\n"
