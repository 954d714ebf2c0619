"""shipway list"""

from __future__ import annotations

from pathlib import Path

from shipway.compiler.cli.finding import Runs
from shipway.compiler.cli.options import Json, Quiet


def command(runs: Runs = Path("runs"), json: Json = False, quiet: Quiet = False) -> None:
    """List the runs, newest first."""
    from shipway.compiler.cli.output import Output
    from shipway.compiler.launch.record import all_runs
    from shipway.compiler.launch.runs import find, status
    from shipway.compiler.render.columns import Columns

    output = Output(as_json=json, quiet=quiet)
    rows = []
    for run, entry in all_runs(runs):
        found = find(runs, str(run.folder))
        assert found is not None
        state = status(found)
        step = state.progress.step if state.progress else 0
        rows.append(
            {
                "run": entry.id,
                "target": entry.target,
                "state": state.state,
                "step": step,
                "launched_at": entry.launched_at,
                "folder": str(run.folder),
            }
        )
    output.data({"runs": rows})
    if not rows:
        output.show(f"no runs in {runs}")
        return
    names = ("run", "target", "state", "step", "launched")
    table = Columns(*((name, "right" if name == "step" else "left") for name in names), wrap=False)
    for row in rows:
        table.add_row(*(str(row[key]) for key in ("run", "target", "state", "step", "launched_at")))
    output.show(table)
