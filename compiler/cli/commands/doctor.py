"""shipway doctor"""

from __future__ import annotations

from shipway.compiler.cli.options import Json, Quiet


def command(json: Json = False, quiet: Quiet = False) -> None:
    """List what this machine has: Python, torch, devices, kernels, launchers, disk."""
    from dataclasses import asdict

    from shipway.compiler.cli import exit_codes
    from shipway.compiler.cli.output import Output
    from shipway.compiler.environment import findings

    output = Output(as_json=json, quiet=quiet)
    found = findings()
    output.data({"findings": [asdict(finding) for finding in found]})
    marks = {"ok": "[green]✓[/]", "note": "[yellow]·[/]", "problem": "[red]✗[/]"}
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in found:
        table.add_row(marks[finding.state], finding.topic, finding.detail, style=None)
    output.show(table)
    if any(finding.state == "problem" for finding in found):
        import typer

        raise typer.Exit(exit_codes.ENVIRONMENT)
