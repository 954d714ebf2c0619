"""A layout in words that need no knowledge of the axes' names."""

from __future__ import annotations

from shipway.compiler.render import units
from shipway.schemas.layout import Layout
from shipway.schemas.plan import StageChange, StagePlan

RECOMPUTE = {
    "none": "all activations are kept for backward",
    "selective": "backward recomputes the cheap operators",
    "full": "backward recomputes whole layers",
}

OFFLOAD = {
    "optimizer": "Optimizer state waits in host memory and passes over the device in slices, once a step.",
    "activations": "What layers keep for backward waits in host memory.",
    "both": "Optimizer state, and what layers keep for backward, wait in host memory.",
}

GATHERED = {
    1: "kept all step, as whole gradients are",
    2: "kept gathered until backward is done",
    3: "freed after use",
}
PLACED = {
    "zbv": ", down the ranks and back up, weights' gradients filling the bubbles",
    "dualpipev": ", down the ranks and back up",
}


def short(layout: Layout) -> str:
    """The degrees above one, as practitioners write them."""
    axes = (
        ("PP", layout.pipeline_parallel),
        ("VP", layout.virtual_stages),
        ("DP", layout.data_parallel_replicate),
        ("FSDP", layout.data_parallel_shard),
        ("CP", layout.context_parallel),
        ("TP", layout.tensor_parallel),
        ("EP", layout.expert_parallel),
    )
    return " ".join(f"{name}{degree}" for name, degree in axes if degree > 1) or "one device"


def policies(layout: Layout) -> str:
    """What a layout has beside its degrees."""
    offload = "" if layout.offload == "none" else f", offload {layout.offload}"
    return f"micro-batch {layout.micro_batch}, recompute {layout.recompute}, ZeRO {layout.zero}{offload}"


def sentences(stage: StagePlan) -> list[str]:
    """What every device does, one thought a line."""
    layout = stage.layout
    lines = []
    if layout.pipeline_parallel > 1:
        chunks = f", {layout.virtual_stages} chunks each" if layout.virtual_stages > 1 else ""
        chunks += PLACED.get(layout.schedule, "")
        lines.append(
            f"The layers are cut over {layout.pipeline_parallel} pipeline ranks{chunks}"
            f" ({_cuts(layout)} layers; schedule {layout.schedule})."
        )
    if layout.tensor_parallel > 1:
        lines.append(
            f"Each matrix is shared by {layout.tensor_parallel} devices (tensor and sequence parallel)."
        )
    if layout.context_parallel > 1:
        part = stage.context_tokens // layout.context_parallel
        lines.append(f"Each sequence is cut over {layout.context_parallel} devices, {part:,} tokens each.")
    if layout.expert_parallel > 1:
        lines.append(f"The routed experts are spread over {layout.expert_parallel} devices.")
    shards = layout.data_parallel_shard * layout.context_parallel
    if shards > 1:
        lines.append(
            f"Parameters and optimizer are sharded over {shards} devices (FSDP), gathered ones"
            f" {GATHERED[layout.zero]}."
        )
    if layout.data_parallel_replicate > 1:
        lines.append(f"{layout.data_parallel_replicate} such groups work as replicas.")
    lines.append(
        f"A step is {_several(layout.micro_batches, 'micro-batch', 'micro-batches')} of"
        f" {_several(layout.micro_batch, 'sequence', 'sequences')} on each of"
        f" {_several(layout.data_parallel, 'data-parallel rank', 'data-parallel ranks')};"
        f" {RECOMPUTE[layout.recompute]}."
    )
    if layout.offload != "none":
        lines.append(OFFLOAD[layout.offload])
    host = stage.memory.host
    if host is not None:
        items = ", ".join(f"{item.name} {units.gibibytes(item.bytes)}" for item in host.items)
        lines.append(
            f"The fullest node needs {units.gibibytes(host.node_bytes)} of host memory, ranks can have"
            f" {units.gibibytes(host.capacity_bytes)}: {items}."
        )
    return lines


def _several(number: int, one: str, many: str) -> str:
    return f"{number:,} {one if number == 1 else many}"


def _cuts(layout: Layout) -> str:
    """Layers of the chunks, runs of equal ones shortened: `3, 18 x 5`."""
    sizes = [last - first for first, last in layout.stage_layers]
    runs: list[tuple[int, int]] = []
    for size in sizes:
        if runs and runs[-1][1] == size:
            runs[-1] = (runs[-1][0] + 1, size)
        else:
            runs.append((1, size))
    return ", ".join(f"{times} x {size}" if times > 1 else str(size) for times, size in runs)


def change_words(change: StageChange) -> tuple[str, ...]:
    """From, to; state, what is read of it, writing, loading, restart, all of it, cost."""
    return (
        f"{change.before} to {change.after}",
        units.transferred(change.state_bytes),
        units.transferred(change.read_bytes),
        units.duration(change.write_seconds),
        units.duration(change.read_seconds),
        units.duration(change.restart_seconds),
        units.duration(change.seconds),
        units.money(change.cost),
    )
