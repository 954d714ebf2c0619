"""Whether a build folder still is what Shipway wrote, by its manifest."""

from __future__ import annotations

import shlex
from pathlib import Path

from shipway.compiler.emit.manifest import read_manifest
from shipway.schemas.diagnostics import Diagnostic, Location

NEEDED = ("plan.json", "model.py")
"""Files that no run starts without; those in `launch/` are what a scheduler runs."""


def missing_files(build: Path, command: str) -> list[Diagnostic]:
    """An error when files that a run needs are gone (LA005); `command` is what built the folder."""
    written = {path for path in read_manifest(build).files if path.startswith("launch/")}
    gone = [path for path in (*NEEDED, *sorted(written)) if not (build / path).is_file()]
    if not gone:
        return []
    names = gone[0] if len(gone) == 1 else f"{gone[0]} and {len(gone) - 1} more"
    return [
        Diagnostic(
            code="LA005",
            summary=f"{build} lacks {names}, which Shipway wrote there",
            where=Location(file=str(build / gone[0])),
            because=tuple(f"{build / path} is gone" for path in gone),
            help=f"Write it again: {command} --out {shlex.quote(str(build))} --force",
        )
    ]


def edited_files(build: Path) -> list[Diagnostic]:
    """A warning for each file that differs from what was written (LA006): it may be meant."""
    manifest = read_manifest(build)
    return [
        Diagnostic(
            code="LA006",
            severity="warning",
            summary=f"{build / path} was edited since Shipway wrote it, and is used as it is",
        )
        for path in sorted(manifest.files)
        if (build / path).is_file() and not manifest.wrote(path, (build / path).read_bytes())
    ]
