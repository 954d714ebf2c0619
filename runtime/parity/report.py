"""The parity table as people and programs read it, and as it is kept."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from shipway.runtime.parity.verdict import Tolerance, Verdict

WIDTH = 260
"""Columns of text, so that no figure is cut short; a terminal may wrap them."""


def show(verdicts: Sequence[Verdict], tolerance: Tolerance, device: str, dtype: str) -> None:
    """The table, in the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=_title(verdicts, tolerance, device, dtype))
    for column, side in (("layout", "left"), ("ranks", "right"), ("verdict", "left")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    columns = _columns(verdicts)
    for column in columns:
        table.add_column(column, justify="right")
    for verdict in verdicts:
        proven = verdict.proven(tolerance)
        style = "green" if proven else "yellow" if verdict.refused else "red"
        cells = (f"{verdict.differences[c]:.0e}" if c in verdict.differences else "" for c in columns)
        word = Text(verdict.word(tolerance), style)
        table.add_row(Text(verdict.name), str(verdict.ranks), word, *cells)
    Console(width=max(Console().width, WIDTH)).print(table)


def _title(verdicts: Sequence[Verdict], tolerance: Tolerance, device: str, dtype: str) -> str:
    proven = sum(verdict.proven(tolerance) for verdict in verdicts)
    return (
        f"{proven} of {len(verdicts)} layouts proven equal to one process: {device}, {dtype},"
        f" gradients within {tolerance.gradients:g} of each, later steps within {tolerance.later:g}"
    )


def _columns(verdicts: Sequence[Verdict]) -> list[str]:
    return sorted({key for verdict in verdicts for key in verdict.differences})


def record(verdicts: Sequence[Verdict], tolerance: Tolerance, device: str, dtype: str) -> dict[str, Any]:
    """The table as data."""
    return {
        "command": f"make parity DEVICE={device} DTYPE={dtype}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()},
        "device": device,
        "dtype": dtype,
        "tolerance": vars(tolerance),
        "rows": [
            {
                "layout": verdict.name,
                "ranks": verdict.ranks,
                "proven": verdict.proven(tolerance),
                "verdict": verdict.word(tolerance),
                "differences": verdict.differences,
            }
            for verdict in verdicts
        ],
    }


def to_json(verdicts: Sequence[Verdict], tolerance: Tolerance, device: str, dtype: str) -> str:
    """The table as JSON text."""
    return json.dumps(record(verdicts, tolerance, device, dtype), indent=1)


def keep(path: Path, verdicts: Sequence[Verdict], tolerance: Tolerance, device: str, dtype: str) -> None:
    """Write verdicts to a file and to its like in Markdown; those of other layouts that it holds stay."""
    now = record(verdicts, tolerance, device, dtype)
    before = json.loads(path.read_text())["rows"] if path.exists() else []
    rows = {row["layout"]: row for row in (*before, *now["rows"])}
    now["rows"] = list(rows.values())
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=1) + "\n")
    path.with_suffix(".md").write_text(_markdown(now))


def _markdown(table: dict[str, Any]) -> str:
    columns = sorted({key for row in table["rows"] for key in row["differences"]})
    proven = sum(row["proven"] for row in table["rows"])
    versions = " · ".join(f"{name} {version}" for name, version in table["versions"].items())
    bounds = ", ".join(f"{name} {value:g}" for name, value in table["tolerance"].items())
    lines = [
        "# Layouts against one process",
        "",
        f"{table['date']} · {table['machine']} · {versions} · {table['device']} · {table['dtype']}",
        "",
        f"    {table['command']}",
        "",
        f"{proven} of {len(table['rows'])} proven. Largest relative differences by group of gradients; the"
        f" bounds: {bounds}.",
        "",
        f"| layout | ranks | verdict | {' | '.join(columns)} |",
        f"|---|---:|---|{'---:|' * len(columns)}",
    ]
    for row in table["rows"]:
        cells = [f"{row['differences'][c]:.0e}" if c in row["differences"] else "" for c in columns]
        lines.append(f"| {row['layout']} | {row['ranks']} | {row['verdict']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
