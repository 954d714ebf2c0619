"""Figures of a plan's HTML report as plain shapes, which the template draws as SVG."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from shipway.compiler.fabric import fabric
from shipway.compiler.frozen import frozen
from shipway.compiler.render import units
from shipway.compiler.timeline import Timeline
from shipway.schemas.cluster import Cluster
from shipway.schemas.plan import BlockParameters, Collective, MemoryBudget, StagePlan

WIDTH = 960
LEFT = 190
"""Room for labels."""
RIGHT = 150
"""Room for figures behind bars."""
ROW = 24
SLOTS = 1200
"""Passes drawn of a pipeline before the rest is left to `plan --trace`."""
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer",
    "activations",
    "communication",
    "scratch",
    "outside",
)
PASSES = {
    "F": ("forward", "forward"),
    "B": ("backward", "backward"),
    "I": ("input gradients", "backward"),
    "W": ("weight gradients", "weight"),
}
"""Words and style of a pass."""
MAP_NODES = 6
"""Nodes of the first pipeline rank that the map shows device by device."""


@frozen
class Rect:
    """A filled box; `tip` is shown while the pointer rests on it."""

    x: float
    y: float
    width: float
    height: float
    style: str
    tip: str = ""


@frozen
class Label:
    """A line of text; `anchor` is start, middle or end."""

    x: float
    y: float
    text: str
    anchor: str = "start"
    style: str = ""


@dataclass
class Figure:
    """Shapes in a box of WIDTH x `height`, and what their colours mean."""

    height: float
    words: str
    """What it shows, for those who cannot see it."""
    rects: list[Rect] = field(default_factory=list)
    labels: list[Label] = field(default_factory=list)
    lines: list[tuple[float, float, float, float]] = field(default_factory=list)
    key: tuple[tuple[str, str], ...] = ()
    """(style, meaning)."""

    def box(self, x: float, y: float, width: float, height: float, style: str, tip: str = "") -> None:
        """Add a box, its numbers rounded so that the text does not depend on the last digit."""
        self.rects.append(
            Rect(round(x, 2), round(y, 2), round(max(width, 0.3), 2), round(height, 2), style, tip)
        )

    def label(self, x: float, y: float, text: str, anchor: str = "start", style: str = "") -> None:
        """Add a line of text."""
        self.labels.append(Label(round(x, 2), round(y, 2), text, anchor, style))


def memory_figure(budgets: Sequence[MemoryBudget]) -> Figure:
    """A bar for each pipeline rank, stacked by category, against what the device has."""
    figure = Figure(ROW * len(budgets) + 34, "memory of each pipeline rank by category")
    capacity = budgets[0].capacity_bytes
    room = WIDTH - LEFT - RIGHT
    scale = room / max(capacity, *(budget.upper_bytes for budget in budgets))
    for row, budget in enumerate(budgets):
        top, x = 8 + row * ROW, float(LEFT)
        figure.label(LEFT - 8, top + 14, budget.rank, "end")
        for category in CATEGORIES:
            items = [item for item in budget.items if item.category == category]
            size = sum(item.bytes for item in items)
            if size:
                tip = "; ".join(f"{item.name} {units.gibibytes(item.bytes)}" for item in items)
                figure.box(x, top, size * scale, ROW - 6, category, f"{category}: {tip}")
                x += size * scale
        upper = LEFT + budget.upper_bytes * scale
        figure.lines.append((round(upper, 2), top + 3, round(upper, 2), top + ROW - 9))
        figure.label(
            LEFT + room + 8, top + 14, f"{units.gibibytes(budget.peak_bytes)} {budget.verdict}", "start"
        )
    edge = round(LEFT + capacity * scale, 2)
    bottom = 8 + ROW * len(budgets)
    figure.lines.append((edge, 2, edge, bottom))
    figure.label(edge, bottom + 16, f"the device has {units.gibibytes(capacity)}", "end")
    figure.key = (*((name, name) for name in CATEGORIES), ("tick", "thin line: upper bound"))
    return figure


def gantt_figure(timeline: Timeline, ranks: int) -> Figure:
    """Forward and backward passes of each pipeline rank over time, from the beginning of the step."""
    slots = timeline.slots[:SLOTS]
    whole = len(slots) == len(timeline.slots)
    end = timeline.step_seconds if whole else slots[-1].start_seconds
    room = WIDTH - LEFT - 20
    scale = room / end
    figure = Figure(ROW * ranks + 30, "passes of each pipeline rank over time")
    for rank in range(ranks):
        figure.label(LEFT - 8, 8 + rank * ROW + 14, f"pipeline rank {rank}", "end")
        figure.box(LEFT, 8 + rank * ROW, room, ROW - 6, "idle", "idle")
        at = timeline.passes_seconds
        for name, seconds in timeline.after if whole else ():
            tip = f"{name}: {units.duration(seconds)}"
            figure.box(LEFT + at * scale, 8 + rank * ROW, seconds * scale, ROW - 6, "after", tip)
            at += seconds
    for slot in slots:
        begin, finish = slot.start_seconds, min(slot.end_seconds, end)
        word, style = PASSES[slot.action.kind]
        tip = f"{word} of micro-batch {slot.action.micro_batch}, chunk {slot.action.chunk}"
        tip += f": {units.duration(slot.end_seconds - slot.start_seconds)}"
        gap = min(0.4, (finish - begin) * scale / 10)
        figure.box(
            LEFT + begin * scale, 8 + slot.rank * ROW, (finish - begin) * scale - gap, ROW - 6, style, tip
        )
    shown = "the whole step" if whole else f"of {units.duration(timeline.step_seconds)}"
    figure.label(LEFT, figure.height - 6, "0")
    figure.label(LEFT + room, figure.height - 6, f"{units.duration(end)}, {shown}", "end")
    figure.key = (("forward", "forward"), ("backward", "backward"))
    if any(slot.action.kind == "W" for slot in slots):
        figure.key += (("weight", "weight gradients"),)
    figure.key += (("idle", "idle"),)
    if whole and timeline.after:
        figure.key += (("after", "reduction exposed, optimizer, checkpoints"),)
    return figure


def mesh_figure(stage: StagePlan, cluster: Cluster) -> Figure:
    """Pipeline ranks as ranges of devices, and the first nodes device by device."""
    layout = stage.layout
    per_rank = stage.devices_used // layout.pipeline_parallel
    per_node = cluster.devices_per_node
    whole = -(-per_rank // per_node)
    nodes = min(whole, MAP_NODES)
    columns = min(layout.pipeline_parallel, 6)
    bands = -(-layout.pipeline_parallel // columns)
    figure = Figure(bands * 46 + 58 + nodes * 40 + 8, "where the mesh lies on the cluster")
    wide = (WIDTH - 20) / columns
    for rank in range(layout.pipeline_parallel):
        x, y = 10 + rank % columns * wide, 6 + rank // columns * 46
        figure.box(x, y, wide - 4, 40, "first" if rank == 0 else "block", f"pipeline rank {rank}")
        first, last = rank * per_rank, (rank + 1) * per_rank - 1
        figure.label(x + wide / 2 - 2, y + 17, f"pipeline rank {rank}", "middle")
        figure.label(x + wide / 2 - 2, y + 32, f"devices {first:,} to {last:,}", "middle", "small")
    top = bands * 46 + 26
    figure.label(10, top, _links(cluster))
    top += 20
    shown = f", the first {nodes} of {whole:,} nodes" if nodes < whole else ""
    figure.label(10, top, f"Pipeline rank 0{shown}, device by device:")
    cell = (WIDTH - 100) / per_node
    for device in range(min(per_rank, nodes * per_node)):
        node, place = divmod(device, per_node)
        x, y = 90 + place * cell, top + 12 + node * 40
        if place == 0:
            figure.label(82, y + 20, f"node {node}", "end")
        figure.box(x, y, cell - 4, 32, f"mesh{device // layout.tensor_parallel % 2}", f"device {device}")
        lines = tuple(_coordinates(stage, device))
        for line, text in enumerate(lines):
            figure.label(x + cell / 2 - 2, y + 26.5 - 6.5 * len(lines) + 13 * line, text, "middle", "small")
    figure.key = (("mesh0", "tensor-parallel groups"), ("mesh1", "alternate"))
    return figure


def _links(cluster: Cluster) -> str:
    """Bandwidths that the axes' groups meet, innermost first."""
    fab = fabric(cluster)
    words = f"{fab.domain} devices share scale-up links of {fab.link_bandwidth / 1e9:,.0f} GB/s each way"
    if fab.network_bandwidth:
        words += f"; between nodes a device has {fab.network_bandwidth / 1e9:,.0f} GB/s"
    if fab.oversubscription > 1:
        words += f", between leaves of {fab.leaf:,} devices 1/{fab.oversubscription:g} of it"
    return words + "."


def _coordinates(stage: StagePlan, device: int) -> Iterable[str]:
    """Where a device of the first pipeline rank stands on each axis longer than one."""
    layout = stage.layout
    rest, tensor = divmod(device, layout.tensor_parallel)
    rest, context = divmod(rest, layout.context_parallel)
    replica, shard = divmod(rest, layout.data_parallel_shard)
    places = (
        ("rep", replica, layout.data_parallel_replicate),
        ("fsdp", shard, layout.data_parallel_shard),
        ("cp", context, layout.context_parallel),
        ("tp", tensor, layout.tensor_parallel),
    )
    words = [f"{name}{place}" for name, place, size in places if size > 1]
    yield " ".join(words) or "alone"
    if layout.expert_parallel > 1:
        yield f"ep{device % layout.expert_parallel}"


def communication_figure(ledger: Sequence[Collective]) -> Figure:
    """Seconds on each mesh axis, the part that nothing hides first."""
    axes: dict[str, list[Collective]] = {}
    for line in ledger:
        axes.setdefault(line.axis, []).append(line)
    figure = Figure(ROW * len(axes) + 12, "communication by axis")
    longest = max(sum(line.seconds for line in lines) for lines in axes.values()) or 1.0
    scale = (WIDTH - LEFT - 260) / longest
    for row, (axis, lines) in enumerate(sorted(axes.items(), key=lambda x: -sum(y.seconds for y in x[1]))):
        seconds, exposed = sum(x.seconds for x in lines), sum(x.exposed_seconds for x in lines)
        top = 6 + row * ROW
        figure.label(LEFT - 8, top + 14, f"{axis} ({lines[0].group_size} ranks)", "end")
        tip = "; ".join(f"{line.name} {units.duration(line.seconds)}" for line in lines)
        figure.box(LEFT, top, exposed * scale, ROW - 6, "exposed", f"exposed: {tip}")
        figure.box(LEFT + exposed * scale, top, (seconds - exposed) * scale, ROW - 6, "hidden", tip)
        text = f"{units.duration(seconds)}, {units.duration(exposed)} exposed"
        figure.label(LEFT + seconds * scale + 8, top + 14, text)
    figure.key = (("exposed", "exposed"), ("hidden", "hidden under compute"))
    return figure


def parameters_figure(blocks: Sequence[BlockParameters]) -> Figure:
    """Parameters of each kind of block; the dark part is what one token passes."""
    figure = Figure(ROW * len(blocks) + 12, "parameters by block")
    scale = (WIDTH - LEFT - 260) / max(block.total for block in blocks)
    for row, block in enumerate(sorted(blocks, key=lambda block: (-block.total, block.block))):
        top = 6 + row * ROW
        figure.label(LEFT - 8, top + 14, f"{block.block} x {block.count}", "end")
        figure.box(LEFT, top, block.total * scale, ROW - 6, "total", f"{block.total:,}")
        figure.box(LEFT, top, block.active * scale, ROW - 6, "active", f"{block.active:,} active")
        text = f"{units.count(block.total)}, {units.count(block.active)} active"
        figure.label(LEFT + block.total * scale + 8, top + 14, text)
    figure.key = (("total", "all"), ("active", "passed by one token"))
    return figure
