"""All nodes' reports together: a table, who is left out, and who trains."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from shipway.runtime.preflight.report import NodeReport, judged


def verdict(folder: Path, nodes: Sequence[str], need: int) -> bool:
    """Judge `nodes` by their reports in `folder`; True when at least `need` are good.

    Writes `exclude` (bad nodes) and `chosen` (the first `need` good ones, in the given order), one a line.
    """
    reports = [_read(folder, node) for node in nodes]
    good = [report.node for report in reports if not report.failed]
    bad = [report.node for report in reports if report.failed]
    (folder / "exclude").write_text("".join(f"{node}\n" for node in bad))
    (folder / "chosen").write_text("".join(f"{node}\n" for node in good[:need]))
    Console(width=120, highlight=False).print(table(reports))
    print(f"{len(good)} of {len(nodes)} nodes are good, {need} needed", flush=True)
    if bad:
        print(f"exclude: {','.join(bad)}", flush=True)
    return len(good) >= need


def table(reports: Sequence[NodeReport]) -> Table:
    """What was found: each failure and warning with its node, then each check that holds, with its range."""
    shown = Table("node", "check", "outcome", "found", "planned", title="Pre-flight", title_justify="left")
    for report in reports:
        for check in report.checks:
            if check.outcome != "ok":
                shown.add_row(report.node, check.name, check.outcome, check.found, check.planned)
    fine = [check for report in reports for check in report.checks if check.outcome == "ok"]
    for name in dict.fromkeys(check.name for check in fine):
        alike = [check for check in fine if check.name == name]
        found = sorted({check.found for check in alike})
        values = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
        count = f"{len(alike)} node{'s' if len(alike) > 1 else ''}"
        shown.add_row(count, name, "ok", values, alike[0].planned)
    return shown


def _read(folder: Path, node: str) -> NodeReport:
    try:
        return NodeReport.model_validate_json((folder / f"{node}.json").read_text())
    except (FileNotFoundError, ValueError):
        return NodeReport(node=node, checks=(judged("answer", False, "no report from this node"),))
