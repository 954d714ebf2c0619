"""A whole plan for a terminal: what is trained, how it is spread, what it needs, takes and costs."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.rule import Rule
from rich.text import Text

from shipway.compiler.render import units
from shipway.compiler.render.columns import Columns
from shipway.compiler.render.sentence import Sentence
from shipway.compiler.render.words import change_words, policies, sentences, short
from shipway.schemas.plan import MemoryBudget, Plan, StagePlan

VERDICT_STYLE = {"fits": "green", "tight": "yellow", "does not fit": "bold red"}
CATEGORY_STYLE = {
    "parameters": "blue",
    "gradients": "cyan",
    "optimizer": "magenta",
    "activations": "green",
    "communication": "yellow",
    "scratch": "bright_black",
    "outside": "red",
}
BAR_COLUMNS = 64
ITEMS = 9
"""Lines of a budget before the rest is summed up."""


def render_plan(plan: Plan) -> RenderableType:
    """Everything a newcomer needs to judge the plan."""
    parts: list[RenderableType] = [
        Text(),
        *_heading(plan),
        _parameters(plan),
        Text(),
        _overview(plan),
    ]
    for stage in plan.stages:
        parts += [Text(), *_stage(stage)]
    if plan.changes:
        parts += [Text(), _changes(plan)]
    parts += [Text(), *_totals(plan)]
    return Group(*parts)


def _heading(plan: Plan) -> Iterable[RenderableType]:
    cluster, parameters = plan.blueprint.cluster, plan.parameters
    devices = f"{cluster.devices:,} x {cluster.device.name}"
    yield Text.assemble(
        (plan.name, "bold"),
        f": {units.count(parameters.total)} parameters,"
        f" {units.count(parameters.active)} active per token,"
        f" on {devices} ({cluster.name})",
    )
    if plan.fp8_linears:
        yield Sentence(
            Text(
                f"Computes in bf16, but for {len(plan.fp8_linears):,} projections whose products run in fp8,"
                " scaled by row; MFU and HFU are of the bf16 peak."
            )
        )
    yield Text(f"plan {plan.hash[:19]}   times from: {plan.calibration}", style="dim")
    yield Text()


def _parameters(plan: Plan) -> Columns:
    table = Columns(("block", "left"), ("blocks", "right"), ("parameters", "right"), ("active", "right"))
    for block in plan.parameters.blocks:
        table.add_row(block.block, f"{block.count:,}", units.count(block.total), units.count(block.active))
    parameters = plan.parameters
    table.add_row("total", "", f"{parameters.total:,}", f"{parameters.active:,}", style="bold")
    return table


def _overview(plan: Plan) -> Columns:
    table = Columns(
        ("stage", "left"),
        ("context", "right"),
        ("tokens", "right"),
        ("steps", "right"),
        ("layout", "left"),
        ("step", "right"),
        ("tokens/s", "right"),
        ("MFU", "right"),
        ("memory", "right"),
        ("time", "right"),
        ("cost", "right"),
    )
    for stage in plan.stages:
        table.add_row(
            stage.name,
            units.context(stage.context_tokens),
            units.count(stage.tokens),
            f"{stage.steps:,}",
            short(stage.layout),
            units.duration(stage.step_seconds),
            units.count(stage.tokens_per_second),
            units.percent(stage.mfu),
            Text(
                f"{units.gibibytes(stage.memory.peak_bytes)} {stage.memory.verdict}",
                style=VERDICT_STYLE[stage.memory.verdict],
            ),
            units.duration(stage.hours * 3600),
            units.money(stage.cost),
        )
    return table


def _stage(stage: StagePlan) -> Iterable[RenderableType]:
    yield Rule(Text(f"stage {stage.name}: {short(stage.layout)}"), align="left", style="dim")
    for line in sentences(stage):
        yield Sentence(Text(line))
    yield Text()
    yield from _memory(stage)
    yield Text()
    yield from _time(stage)
    if stage.communication:
        yield Text()
        yield _ledger(stage)
    if stage.alternatives:
        yield Text()
        yield _alternatives(stage)


def _memory(stage: StagePlan) -> Iterable[RenderableType]:
    worst = max(stage.memory.ranks, key=lambda budget: budget.peak_bytes)
    yield Sentence(
        Text.assemble(
            ("Memory", "bold"),
            f" of {worst.rank} when {worst.moment}: needs {units.gibibytes(worst.peak_bytes)}"
            f" (at most {units.gibibytes(worst.upper_bytes)}), has {units.gibibytes(worst.capacity_bytes)}: ",
            (worst.verdict, VERDICT_STYLE[worst.verdict]),
        )
    )
    yield Text(
        f"allocated {units.gibibytes(worst.allocated_bytes)},"
        f" reserved {units.gibibytes(worst.reserved_bytes)},"
        f" outside the allocator {units.gibibytes(worst.outside_bytes)}",
        style="dim",
    )
    yield _Bar(worst)
    table = Columns(("", "left"), ("size", "right"), ("", "left"))
    shown, rest = worst.items[:ITEMS], worst.items[ITEMS:]
    for item in shown:
        name = Text.assemble(("■ ", CATEGORY_STYLE[item.category]), item.name)
        table.add_row(name, units.gibibytes(item.bytes), Text(item.note, style="dim"))
    if rest:
        table.add_row(f"  {len(rest)} smaller items", units.gibibytes(sum(item.bytes for item in rest)), "")
    yield table
    if len(stage.memory.ranks) > 1:
        each = ", ".join(f"{budget.peak_bytes / units.GIB:,.0f}" for budget in stage.memory.ranks)
        yield Text(f"Pipeline ranks in order, GiB: {each}", style="dim")


class _Bar:
    """The budget as a bar that is as long as the device's memory, in one line."""

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        share = f" {self.budget.peak_bytes / self.budget.capacity_bytes:.0%}"
        columns = min(BAR_COLUMNS, options.max_width - len(share))
        yield Text.assemble(_bar(self.budget, columns), share, no_wrap=True)


def _bar(budget: MemoryBudget, columns: int) -> Text:
    scale = columns / max(budget.capacity_bytes, budget.peak_bytes)
    bar, position, drawn = Text(), 0.0, 0
    order = list(CATEGORY_STYLE)
    for item in sorted(budget.items, key=lambda item: (order.index(item.category), -item.bytes)):
        position += item.bytes * scale
        cells = round(position) - drawn
        bar.append("█" * cells, style=CATEGORY_STYLE[item.category])
        drawn += cells
    bar.append("░" * max(round(budget.capacity_bytes * scale) - drawn, 0), style="dim")
    return bar


def _time(stage: StagePlan) -> Iterable[RenderableType]:
    yield Text.assemble(
        ("Time", "bold"),
        f" of one step: {units.duration(stage.step_seconds)};"
        f" {units.count(stage.tokens_per_second)} tokens/s,"
        f" MFU {units.percent(stage.mfu)}, HFU {units.percent(stage.hfu)}",
    )
    table = Columns(("", "left"), ("time", "right"), ("share", "right"), ("", "left"))
    for item in stage.time:
        share = item.seconds / stage.step_seconds
        if share >= 0.002:
            table.add_row(
                item.name, units.duration(item.seconds), units.percent(share), Text(item.note, style="dim")
            )
    yield table


def _ledger(stage: StagePlan) -> Columns:
    table = Columns(
        ("collective", "left"),
        ("what", "left"),
        ("axis", "left"),
        ("ranks", "right"),
        ("size", "right"),
        ("calls", "right"),
        ("over", "left"),
        ("time", "right"),
        ("exposed", "right"),
    )
    shown = stage.communication[:6]
    for line in shown:
        table.add_row(
            line.collective.replace("_", "-"),
            line.name,
            line.axis,
            str(line.group_size),
            units.transferred(line.bytes),
            f"{line.count:,}",
            line.link,
            units.duration(line.seconds),
            units.duration(line.exposed_seconds),
        )
    rest = stage.communication[len(shown) :]
    if rest:
        seconds, exposed = sum(x.seconds for x in rest), sum(x.exposed_seconds for x in rest)
        table.add_row(
            f"{len(rest)} more", *[""] * 6, units.duration(seconds), units.duration(exposed), style="dim"
        )
    return table


def _alternatives(stage: StagePlan) -> RenderableType:
    table = Columns(("runner-up", "left"), ("step", "right"), ("memory", "right"), ("why not", "left"))
    for other in stage.alternatives:
        layout = other.layout
        table.add_row(
            f"{short(layout)}, {policies(layout)}",
            units.duration(other.step_seconds),
            units.gibibytes(other.peak_bytes),
            other.reason,
        )
    return Group(Text(f"Best of {stage.candidates:,} legal layouts.", style="dim"), table)


def _changes(plan: Plan) -> RenderableType:
    """What the programme takes between its stages."""
    table = Columns(
        ("between stages", "left"),
        ("state", "right"),
        ("read", "right"),
        ("write", "right"),
        ("load", "right"),
        ("restart", "right"),
        ("in all", "right"),
        ("cost", "right"),
        ("", "left"),
    )
    for change in plan.changes:
        note = Text("a new job" if change.new_job else "the same processes", style="dim")
        table.add_row(*change_words(change), note)
    return table


def _totals(plan: Plan) -> Iterable[RenderableType]:
    totals = plan.totals
    yield Rule(style="dim")
    yield Sentence(
        Text.assemble(
            ("In all: ", "bold"),
            f"{units.count(totals.tokens)} tokens, {units.duration(totals.hours * 3600)},"
            f" {units.hours(totals.device_hours)} device-hours, {units.money(totals.cost)}"
            f"{_counted(plan)}",
        )
    )
    for warning in plan.warnings:
        yield Sentence(Text.assemble(("warning: ", "yellow"), warning))


def _counted(plan: Plan) -> str:
    """What the totals count, where some stage leaves devices idle."""
    held = plan.blueprint.cluster.devices
    idle = any(stage.devices_used < held for stage in plan.stages)
    return (
        "; device-hours and cost count the devices that each stage uses, idle ones left out" if idle else ""
    )
