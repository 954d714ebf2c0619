"""Nodes that a run is not to use again: those that failed its pre-flight, or that the user named."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from shipway.compiler.launch.execute import execute
from shipway.compiler.launch.target import Target
from shipway.schemas.run import RunRecord

EXCLUDE_FILE = "exclude"
"""In a run's folder, one node a line; delete it to give them another chance."""


def read_excluded(folder: Path) -> tuple[str, ...]:
    """Names of the nodes, in alphabetic order."""
    path = folder / EXCLUDE_FILE
    return tuple(sorted(set(path.read_text().split()))) if path.exists() else ()


def exclude(folder: Path, nodes: Iterable[str]) -> None:
    """Add nodes."""
    every = sorted({*read_excluded(folder), *nodes})
    (folder / EXCLUDE_FILE).write_text("".join(f"{node}\n" for node in every))


def accused(target: Target, record: RunRecord) -> tuple[str, ...]:
    """Nodes that the cluster's own record of the latest launch names as bad; none when it does not answer."""
    answers = [execute(command) for command in target.accusations(record)]
    return target.accused("".join(output for code, output in answers if code == 0))
