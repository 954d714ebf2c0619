"""What `build` and `launch` share: from a plan file or a blueprint to a build folder."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from shipway.compiler.cli import exit_codes
from shipway.compiler.cli.output import Output
from shipway.compiler.cli.planning import plan_source
from shipway.compiler.frozen import frozen
from shipway.schemas.plan import Plan

BUILDS = Path("build")


@frozen
class Built:
    """A build folder that stands."""

    folder: Path
    plan: Plan
    written: list[Path]
    """Files written, relative to the folder."""
    unchanged: list[Path]
    """Files that held the same bytes already."""


def build_source(
    source: str,
    overrides: Sequence[str] | None,
    config_dir: Path | None,
    out: Path | None,
    force: bool,
    output: Output,
) -> Built:
    """Build from a plan file, which must be current, or from a blueprint, which is planned first."""
    from shipway.compiler.emit.build import build

    plan = plan_source(source, overrides, config_dir, output)
    folder = out if out is not None else BUILDS / plan.name
    built = build(plan, folder, force, command=_typed(source, overrides, config_dir, out))
    if isinstance(built, list):
        output.fail(built, exit_codes.ENVIRONMENT)
    return Built(built.folder, plan, list(built.written), list(built.unchanged))


def _typed(source: str, overrides: Sequence[str] | None, config_dir: Path | None, out: Path | None) -> str:
    """The command that builds this, as a person types it."""
    words = ["shipway", "build", source, *(overrides or ())]
    words += ["--config-dir", str(config_dir)] if config_dir is not None else []
    return shlex.join([*words, *(["--out", str(out)] if out is not None else [])])
