"""shipway status"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from shipway.compiler.cli.finding import RunName, Runs
from shipway.compiler.cli.options import Json, Quiet

if TYPE_CHECKING:
    from shipway.compiler.launch.runs import RunStatus
    from shipway.compiler.render.columns import Columns


def command(
    name: RunName = None, runs: Runs = Path("runs"), json: Json = False, quiet: Quiet = False
) -> None:
    """Say where a run stands: its jobs, its attempts, its last step."""
    from dataclasses import asdict

    from shipway.compiler.cli.finding import find_run
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.runs import status

    output = Output(as_json=json, quiet=quiet)
    found = find_run(name, runs, output)
    state = status(found)
    jobs = [{**job.job.model_dump(), "state": job.state, "detail": job.detail} for job in state.jobs]
    output.data(
        {
            "run": found.record.id,
            "target": found.record.target,
            "plan_hash": found.record.plan_hash,
            "folder": str(found.run.folder),
            "state": state.state,
            "detail": state.detail,
            "jobs": jobs,
            "bad_nodes": list(state.bad_nodes),
            "attempts": [attempt.model_dump() for attempt in state.attempts],
            "checkpoint": str(state.checkpoint) if state.checkpoint else None,
            "progress": asdict(state.progress) if state.progress else None,
        }
    )
    detail = f" ({state.detail})" if state.detail and state.detail != state.state else ""
    output.show(f"[bold]{found.record.id}[/] on {found.record.target}: [bold]{state.state}[/]{detail}")
    if state.progress:
        where = f"stage {state.progress.stage}, step {state.progress.step}"
        output.show(f"{where}, loss {state.progress.loss:.4f}")
    if state.jobs or state.attempts:
        output.show(_table(state))
    for name, path in files_of(found.run.folder, state.checkpoint):
        output.show(f"{name:<10}  {path}")


def files_of(folder: Path, checkpoint: Path | None) -> list[tuple[str, Path]]:
    """What of a run a person would open, where it exists."""
    named = [("run", folder), ("checkpoint", checkpoint), ("report", folder / "report.html")]
    return [(name, path) for name, path in named if path is not None and path.exists()]


def _table(state: RunStatus) -> Columns:
    from shipway.compiler.render.columns import Columns

    names = ("", "stage", "job", "state", "nodes", "ended")
    table = Columns(*((name, "left") for name in names), wrap=False)
    for attempt in state.attempts:
        cells = (attempt.stage, attempt.job, attempt.reason, attempt.nodes, attempt.ended_at)
        table.add_row(f"attempt {attempt.number}", *cells)
    for job in state.jobs:
        table.add_row("now", job.job.stage, job.job.id, job.detail or job.state, "", "")
    return table
