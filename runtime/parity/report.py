"""The parity table as people and programs read it, and as it is kept."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from shipway.runtime.parity.verdict import TOLERANCES, Verdict

WIDTH = 260
"""Columns of text, so that no figure is cut short; a terminal may wrap them."""


def show(verdicts: Sequence[Verdict], device: str, dtype: str) -> None:
    """The table, in the terminal."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    proven = sum(verdict.proven for verdict in verdicts)
    bounds = TOLERANCES[device, dtype].describe()
    table = Table(title=f"{proven} of {len(verdicts)} layouts proven equal: {device}, {dtype}; {bounds}")
    for column, side in (("layout", "left"), ("ranks", "right"), ("verdict", "left")):
        table.add_column(column, justify=side, no_wrap=True)  # type: ignore[arg-type]
    columns = _columns([verdict.differences for verdict in verdicts])
    for column in columns:
        table.add_column(column, justify="right")
    for verdict in verdicts:
        style = "green" if verdict.proven else "yellow" if verdict.refused else "red"
        word = Text(verdict.word, style)
        cells = _cells(verdict.differences, columns)
        table.add_row(Text(verdict.name), str(verdict.ranks), word, *cells)
    Console(width=max(Console().width, WIDTH)).print(table)


def _columns(rows: Sequence[Mapping[str, float]]) -> list[str]:
    return sorted({key for row in rows for key in row})


def _cells(row: Mapping[str, float], columns: Sequence[str]) -> list[str]:
    return [f"{row[c]:.0e}" if c in row else "" for c in columns]


def record(verdicts: Sequence[Verdict], device: str, dtype: str) -> dict[str, Any]:
    """The table as data."""
    on_gpus = device == "cuda"
    return {
        "command": f"make parity DEVICE={device} DTYPE={dtype}",
        "date": datetime.now(UTC).date().isoformat(),
        "machine": _gpus() if on_gpus else platform.machine(),
        "versions": {"torch": torch.__version__, "python": platform.python_version()} | _packages(on_gpus),
        "device": device,
        "dtype": dtype,
        "tolerance": TOLERANCES[device, dtype].describe(),
        "one_process": {verdict.case: verdict.own for verdict in verdicts if verdict.own},
        "rows": [
            {
                "layout": verdict.name,
                "ranks": verdict.ranks,
                "proven": verdict.proven,
                "verdict": verdict.word,
                "case": verdict.case,
                "differences": verdict.differences,
                "bounds": verdict.bounds,
            }
            for verdict in verdicts
        ],
    }


def _gpus() -> str:
    return f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"


def _packages(on_gpus: bool) -> dict[str, str]:
    """What else took part on GPUs."""
    if not on_gpus:
        return {}
    found = {"nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    try:
        return found | {"fla-core": version("fla-core")}
    except PackageNotFoundError:
        return found


def to_json(verdicts: Sequence[Verdict], device: str, dtype: str) -> str:
    """The table as JSON text."""
    return json.dumps(record(verdicts, device, dtype), indent=1)


def keep(path: Path, verdicts: Sequence[Verdict], device: str, dtype: str) -> None:
    """Write verdicts to a file and to its like in Markdown; those of other layouts that it holds stay."""
    now = record(verdicts, device, dtype)
    before = json.loads(path.read_text()) if path.exists() else {"rows": []}
    rows = {row["layout"]: row for row in (*before["rows"], *now["rows"])}
    now["rows"] = list(rows.values())
    now["one_process"] = before.get("one_process", {}) | now["one_process"]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(now, indent=1) + "\n")
    path.with_suffix(".md").write_text(_markdown(now))


def proven_before(path: Path) -> set[str]:
    """Layouts that a kept table holds proven."""
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return {row["layout"] for row in rows if row["proven"]}


def _markdown(table: dict[str, Any]) -> str:
    rows, one_process = table["rows"], table["one_process"]
    columns = _columns([row["differences"] for row in rows])
    proven = sum(row["proven"] for row in rows)
    versions = " · ".join(f"{name} {version}" for name, version in table["versions"].items())
    lines = [
        "# Layouts against one process",
        "",
        f"{table['date']} · {table['machine']} · {versions} · {table['device']} · {table['dtype']}",
        "",
        f"    {table['command']}",
        "",
        f"{proven} of {len(rows)} proven. Largest differences by group of gradients;"
        f" {table['tolerance']}; norm of own 3e-05, scale 0.25.",
        "",
        f"| layout | ranks | verdict | {' | '.join(columns)} |",
        f"|---|---:|---|{'---:|' * len(columns)}",
        *(
            f"| {row['layout']} | {row['ranks']} | {row['verdict']} |"
            f" {' | '.join(_cells(row['differences'], columns))} |"
            for row in rows
        ),
    ]
    if one_process:
        lines += [
            "",
            f"What one process in {table['dtype']} is off, by model and batch:",
            "",
            f"| model, batch | {' | '.join(columns)} |",
            f"|---|{'---:|' * len(columns)}",
            *(f"| {case} | {' | '.join(_cells(off, columns))} |" for case, off in one_process.items()),
        ]
    return "\n".join(lines) + "\n"
