"""A plan as one self-contained HTML file: no script, no outside reference, the same bytes every time."""

from __future__ import annotations

from collections.abc import Sequence

from shipway.compiler.emit.templates import templates
from shipway.compiler.frozen import frozen
from shipway.compiler.render import units
from shipway.compiler.render.words import change_words, policies, sentences, short
from shipway.compiler.report_figures import (
    Figure,
    communication_figure,
    gantt_figure,
    memory_figure,
    mesh_figure,
    parameters_figure,
)
from shipway.compiler.timeline import Timeline, timelines
from shipway.schemas.calibration import Calibration
from shipway.schemas.plan import Plan, StagePlan


@frozen
class Section:
    """One stage as the template shows it."""

    name: str
    layout: str
    sentences: tuple[str, ...]
    tiles: tuple[tuple[str, str, str], ...]
    """(name, value, note)."""
    memory: Figure
    moment: str
    gantt: Figure
    mesh: Figure
    communication: Figure | None
    time: tuple[tuple[str, str, str, str], ...]
    runners: tuple[tuple[str, str, str, str], ...]
    candidates: str


def report_html(plan: Plan, calibration: Calibration | None = None) -> str:
    """The text of the file; `calibration` must be the one that the plan was made with."""
    return page(plan, timelines(plan, calibration))


def page(plan: Plan, drawn: Sequence[Timeline]) -> str:
    """The text of the file for a plan and the timelines of its stages."""
    sections = [_section(plan, stage, line) for stage, line in zip(plan.stages, drawn, strict=True)]
    totals = plan.totals
    return (
        templates("report")
        .get_template("plan.html.j2")
        .render(
            plan=plan,
            cluster=f"{plan.blueprint.cluster.devices:,} x {plan.blueprint.cluster.device.name}",
            total=units.count(plan.parameters.total),
            active=units.count(plan.parameters.active),
            tiles=(
                ("tokens", units.count(totals.tokens), ""),
                ("time", units.duration(totals.hours * 3600), ""),
                ("device-hours", f"{totals.device_hours:,.0f}", ""),
                ("cost", units.money(totals.cost), ""),
            ),
            changes=[change_words(change) for change in plan.changes],
            parameters=parameters_figure(plan.parameters.blocks),
            sections=sections,
        )
    )


def _section(plan: Plan, stage: StagePlan, timeline: Timeline) -> Section:
    worst = max(stage.memory.ranks, key=lambda budget: budget.peak_bytes)
    return Section(
        name=stage.name,
        layout=short(stage.layout),
        sentences=tuple(sentences(stage)),
        tiles=(
            ("context", units.context(stage.context_tokens), f"{units.count(stage.tokens)} tokens"),
            ("step", units.duration(stage.step_seconds), f"{stage.steps:,} steps"),
            ("tokens/s", units.count(stage.tokens_per_second), f"MFU {units.percent(stage.mfu)}"),
            ("memory", units.gibibytes(stage.memory.peak_bytes), stage.memory.verdict),
            ("time", units.duration(stage.hours * 3600), units.money(stage.cost)),
        ),
        memory=memory_figure(stage.memory.ranks),
        moment=f"{worst.rank} peaks when {worst.moment}: needs {units.gibibytes(worst.peak_bytes)}, at most"
        f" {units.gibibytes(worst.upper_bytes)}, has {units.gibibytes(worst.capacity_bytes)}.",
        gantt=gantt_figure(timeline, stage.layout.pipeline_parallel),
        mesh=mesh_figure(stage, plan.blueprint.cluster),
        communication=communication_figure(stage.communication) if stage.communication else None,
        time=tuple(
            (
                item.name,
                units.duration(item.seconds),
                units.percent(item.seconds / stage.step_seconds),
                item.note,
            )
            for item in stage.time
        ),
        runners=tuple(
            (
                f"{short(other.layout)}, {policies(other.layout)}",
                units.duration(other.step_seconds),
                units.gibibytes(other.peak_bytes),
                other.reason,
            )
            for other in stage.alternatives
        ),
        candidates=f"{stage.candidates:,}",
    )
