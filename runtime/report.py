"""The report of a run: one HTML page, planned beside measured. `python -m shipway.runtime.report RUN`."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from shipway.runtime.build_folder import read_plan
from shipway.runtime.charts import Chart, make_chart
from shipway.runtime.checkpoint_folder import Torn, checkpoint_folders, read_marker
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.metrics import read_metrics
from shipway.runtime.run_folder import RunFolder, replace_text
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Plan, StagePlan
from shipway.schemas.run import ATTEMPTS_FILE, Attempt

WARM_UP_STEPS = 3
"""First steps of a stage that say nothing of its speed."""
GIB = 2**30


@dataclass(frozen=True)
class Comparison:
    """One figure of a stage, as planned and as it came."""

    stage: str
    figure: str
    planned: str
    measured: str
    ratio: str


def write_report(run: Path) -> Path:
    """Write report.html into a run's folder from what lies there; returns its path."""
    environment = Environment(
        loader=PackageLoader("shipway.templates", "report"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    path = run / "report.html"
    replace_text(path, environment.get_template("report.html.j2").render(r=gather(run)))
    return path


def try_report(run: Path) -> str:
    """Where the report is, or why there is none: a run's exit must not hang on its report."""
    try:
        return f"report: {write_report(run)}"
    except (Fatal, OSError, LookupError, ValueError, TypeError) as error:
        return f"no report: {type(error).__name__}: {error}"


def gather(run: Path) -> dict[str, Any]:
    """Everything the template shows; raises Fatal when the folder has no plan."""
    plan, folder = read_plan(run), RunFolder(run)
    lines = read_metrics(folder.metrics)
    steps = [line for line in lines if "event" not in line]
    evaluations = [line for line in lines if line.get("event") == "evaluation"]
    status, environment = folder.read_status(), folder.read_environment()
    state = str(status.get("state", "not started"))
    return {
        "title": plan.name,
        "run": run.name,
        "state": state,
        "failed": state not in ("done", "running", "preempted", "stopped"),
        "reason": str(status.get("reason", "")),
        "plan_hash": plan.hash,
        "tiles": _tiles(plan, steps),
        "comparison": [row for stage in plan.stages for row in compare(stage, steps)]
        + _compare_parameters(plan, environment),
        "comparison_note": _comparison_note(steps),
        "charts": [chart for chart in _charts(plan, steps, evaluations) if chart],
        "stages": [_stage(stage, steps, evaluations) for stage in plan.stages],
        "measures": _measures(plan, evaluations),
        "checkpoints": _checkpoints(folder.checkpoints),
        "attempts": _attempts(run / ATTEMPTS_FILE),
        "environment": sorted((k, v) for k, v in environment.items() if k != "parameters"),
        "warnings": plan.warnings,
    }


def compare(stage: StagePlan, steps: Sequence[dict[str, Any]]) -> list[Comparison]:
    """Step time, speed, utilisation and, where the device counts it, memory of a stage."""
    mine = [step for step in steps if step["stage"] == stage.name]
    steady = mine[WARM_UP_STEPS:] or mine
    if not steady:
        return []
    seconds = statistics.median(step["step_seconds"] for step in steady)
    speed = statistics.median(step["tokens_per_second"] for step in steady)
    mfu = statistics.median(step["mfu"] for step in steady)
    rows = [
        _row(stage.name, "step time, s", stage.step_seconds, seconds, "{:.3g}"),
        _row(stage.name, "tokens per second", stage.tokens_per_second, speed, "{:,.0f}"),
        _row(stage.name, "model FLOPs utilisation", stage.mfu, mfu, "{:.2%}"),
    ]
    for kind in ("allocated", "reserved"):
        measured = mine[-1][f"memory_{kind}_bytes"]
        if measured is not None:
            planned = mine[-1][f"planned_memory_{kind}_bytes"] / GIB
            name = f"peak memory {kind}, GiB"
            rows.append(_row(stage.name, name, planned, measured / GIB, "{:.2f}"))
    return rows


def _row(stage: str, figure: str, planned: float, measured: float, form: str) -> Comparison:
    ratio = f"{measured / planned:.2f}" if planned else "–"
    return Comparison(stage, figure, form.format(planned), form.format(measured), ratio)


def _compare_parameters(plan: Plan, environment: dict[str, Any]) -> list[Comparison]:
    counted = environment.get("parameters")
    if counted is None:
        return []
    return [_row("all", "parameters", plan.parameters.total, int(counted), "{:,.0f}")]


def _comparison_note(steps: Sequence[dict[str, Any]]) -> str:
    note = f"Medians over a stage's steps but its first {WARM_UP_STEPS}."
    if steps and steps[-1]["memory_allocated_bytes"] is None:
        note += " Memory is planned for, but CPUs do not count a process's tensors, so it is not measured."
    return note


def _tiles(plan: Plan, steps: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    total_steps = sum(stage.steps for stage in plan.stages)
    if not steps:
        return [{"name": "steps", "value": f"0 of {total_steps:,}", "note": ""}]
    first, last = steps[0], steps[-1]
    busy = _duration(sum(step["step_seconds"] for step in steps))
    waited = sum(step["data_wait_seconds"] for step in steps)
    parameters = plan.parameters
    rows = [
        ("loss", f"{last['loss']:.4f}", f"from {first['loss']:.4f}"),
        ("steps", f"{last['step']:,}", f"of {total_steps:,}"),
        ("tokens", f"{last['tokens']:,}", f"of {plan.totals.tokens:,}"),
        ("time in steps", busy, f"{waited:.1f} s waiting for data"),
        ("parameters", f"{parameters.total:,}", f"{parameters.active:,} active"),
    ]
    return [{"name": name, "value": value, "note": note} for name, value, note in rows]


def _charts(
    plan: Plan, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> list[Chart | None]:
    begins = {}
    for step in steps:
        begins.setdefault(step["stage"], float(step["step"]))
    held_out = [
        (e["step"], e["measures"]["held_out/all"]) for e in evaluations if "held_out/all" in e["measures"]
    ]
    losses = [(step["step"], step["loss"]) for step in steps]
    routed = [step for step in steps if step["expert_load"]]
    worst = [(step["step"], max(step["expert_load"].values())) for step in routed]
    mean = [(step["step"], statistics.mean(step["expert_load"].values())) for step in routed]
    speeds = [(step["step"], step["tokens_per_second"]) for step in steps]
    planned = [(step["step"], step["planned_tokens_per_second"]) for step in steps]
    return [
        make_chart("Loss", {"training loss": losses}, begins, held_out, "held-out loss"),
        make_chart(
            "Expert load, largest over mean", {"mean of the layers": mean, "worst layer": worst}, begins
        ),
        make_chart("Tokens per second", {"measured": speeds, "planned": planned}, begins),
    ]


def _stage(
    stage: StagePlan, steps: Sequence[dict[str, Any]], evaluations: Sequence[dict[str, Any]]
) -> dict[str, str]:
    mine = [step for step in steps if step["stage"] == stage.name]
    held_out = [
        e["measures"]["held_out/all"]
        for e in evaluations
        if e["stage"] == stage.name and "held_out/all" in e["measures"]
    ]
    return {
        "name": stage.name,
        "context": f"{stage.context_tokens:,}",
        "steps": f"{mine[-1]['stage_step'] if mine else 0:,} of {stage.steps:,}",
        "tokens": f"{stage.tokens:,}",
        "layout": describe_layout(stage.layout),
        "loss": f"{mine[-1]['loss']:.4f}" if mine else "–",
        "held_out": f"{held_out[-1]:.4f}" if held_out else "–",
    }


def describe_layout(layout: Layout) -> str:
    """The axes of more than one rank, then the micro-batches."""
    axes = {
        "pipeline": layout.pipeline_parallel,
        "replicas": layout.data_parallel_replicate,
        "shards": layout.data_parallel_shard,
        "context": layout.context_parallel,
        "tensor": layout.tensor_parallel,
        "experts": layout.expert_parallel,
    }
    named = [f"{name} {size}" for name, size in axes.items() if size > 1] or ["one device"]
    return f"{' × '.join(named)}; {layout.micro_batches} × {layout.micro_batch} sequences"


def _measures(plan: Plan, evaluations: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    last = {e["stage"]: e["measures"] for e in evaluations}
    stages = [stage.name for stage in plan.stages if stage.name in last]
    names = list(dict.fromkeys(name for stage in stages for name in last[stage]))
    if not names:
        return None
    rows = [{"name": name, "figures": [_measure(name, last[s].get(name)) for s in stages]} for name in names]
    return {"stages": stages, "rows": rows}


def _measure(name: str, value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.4f}" if name.startswith("held_out/") else f"{value:.0%}"


def _checkpoints(root: Path) -> list[dict[str, str]]:
    rows = []
    for folder in checkpoint_folders(root):
        found = read_marker(folder)
        if isinstance(found, Torn):
            rows.append({"name": folder.name, "stage": "–", "step": "–", "size": "–", "state": found.reason})
            continue
        size = sum(entry.bytes for entry in found.files.values())
        position = found.progress["position"]
        rows.append(
            {
                "name": folder.name,
                "stage": position["stage"],
                "step": f"{position['step']:,}",
                "size": f"{size / 2**20:,.1f} MiB",
                "state": "finished",
            }
        )
    return rows


def _attempts(path: Path) -> list[Attempt]:
    if not path.exists():
        return []
    return [Attempt.model_validate_json(line) for line in path.read_text().splitlines() if line.strip()]


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} min" if hours else f"{minutes} min {rest:02} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report and print where it is."""
    parser = argparse.ArgumentParser(prog="shipway.runtime.report", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a run")
    try:
        print(write_report(parser.parse_args(arguments).run.resolve()))
    except Fatal as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
