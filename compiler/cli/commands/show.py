"""shipway show"""

from __future__ import annotations

from typing import Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet


def command(
    plan: Annotated[
        str, typer.Argument(metavar="PLAN", help="A plan file, or a build folder.", show_default=False)
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show a plan again."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.cli.planning import load_plan
    from shipway.schemas.plan import canonical_json

    output = Output(as_json=json, quiet=quiet)
    loaded = load_plan(plan, output)
    output.data(canonical_json(loaded))
    if not json and not quiet:
        from shipway.compiler.render.plan import render_plan

        output.show(render_plan(loaded))
