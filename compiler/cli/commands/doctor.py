"""shipway doctor"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shipway.compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from shipway.compiler.cli.output import Output
    from shipway.compiler.environment import Finding


def command(
    build: Annotated[
        Path | None,
        typer.Argument(
            metavar="[BUILD]",
            help="A build folder: ask the cluster that it names, too, whether it would take it.",
            show_default=False,
        ),
    ] = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """List what this machine has: Python, torch, devices, kernels, launchers, disk."""
    from dataclasses import asdict

    from rich.table import Table

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.output import Output
    from shipway.compiler.environment import findings

    output = Output(as_json=json, quiet=quiet)
    found = [*findings(), *(_of_cluster(build, output) if build is not None else [])]
    output.data({"findings": [asdict(finding) for finding in found]})
    marks = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "problem": "[red]✗[/]"}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in found:
        table.add_row(marks[finding.state], finding.topic, finding.detail, style=None)
    output.show(table)
    if any(finding.state == "problem" for finding in found):
        raise typer.Exit(exit_codes.ENVIRONMENT)


def _of_cluster(build: Path, output: Output) -> list[Finding]:
    from shipway.compiler.launch.launch import Refusal
    from shipway.compiler.launch.probes import probe

    found = probe(build)
    if isinstance(found, Refusal):
        output.fail(found.diagnostics, found.code)
    return found
