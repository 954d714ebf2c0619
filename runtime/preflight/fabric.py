"""The plan's collectives over the plan's groups, timed against what the plan takes them to cost."""

from __future__ import annotations

import os
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from shipway.runtime.calibration.timing import time_operation
from shipway.runtime.distributed import join, leave
from shipway.runtime.exit_codes import Fatal
from shipway.runtime.mesh import AXES, build_mesh
from shipway.runtime.preflight.report import node_name
from shipway.schemas.layout import Layout
from shipway.schemas.plan import Collective, Plan

LARGEST_BYTES = 256 << 20
"""A larger tensor would tell nothing more of the link."""
SLOW = 2.0
"""A group that takes this many times its peers' median has a bad node in it."""
LATE = 1.5
"""All groups this many times over the plan's figure: the plan's network is not this one."""
MEASURED = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
GROUPS = {name: name for name in AXES} | {"dp_shard": "fsdp", "data": "dp_shard"}
"""The mesh's axis for each of the ledger's, which means by `dp_shard` what FSDP shards over: with cp."""


@dataclass(frozen=True)
class Sample:
    """One group's time for one collective, as one of its ranks saw it."""

    axis: str
    collective: str
    group: tuple[int, ...]
    """Global ranks."""
    node: str
    bytes: int
    seconds: float
    planned_seconds: float


def check_fabric(plan: Plan, stage_name: str, folder: Path) -> bool:
    """Measure on every rank; rank 0 prints the table and writes `exclude`. False when a node should go.

    On CPU the figures are shown but exclude nobody: processes that share cores are slow by turns.
    """
    stage = next((stage for stage in plan.stages if stage.name == stage_name), None)
    if stage is None:
        raise Fatal(f"the plan has no stage {stage_name!r}")
    on_gpus = plan.blueprint.cluster.device.kind != "cpu"
    if on_gpus:
        find_devices(folder)
    device = join("cuda" if on_gpus else "cpu")
    samples = measure(stage.layout, stage.communication, device)
    gathered: list[list[Sample]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, samples)
    everyone = [sample for of_rank in gathered for sample in of_rank]
    suspects = slow_nodes(everyone) if device.type != "cpu" else ()
    if dist.get_rank() == 0:
        Console(width=120, highlight=False).print(table(everyone))
        (folder / "exclude").write_text("".join(f"{node}\n" for node in suspects))
        if suspects:
            print(f"exclude: {','.join(suspects)}", flush=True)
    leave()
    return not suspects


def find_devices(folder: Path) -> None:
    """Raise Fatal, and name this node in `exclude`, when torch has fewer devices here than local ranks.

    Found before the ranks meet: one without a device would keep the others waiting.
    """
    needed, found = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), torch.cuda.device_count()
    if found < needed:
        with (folder / "exclude").open("a") as file:
            file.write(f"{node_name()}\n")
        raise Fatal(f"torch {torch.__version__} finds {found} of {needed} GPUs on {node_name()}")


def measure(layout: Layout, ledger: Sequence[Collective], device: torch.device) -> list[Sample]:
    """This rank's samples: an all-reduce over everyone, then the largest call of each kind on each axis."""
    mesh = build_mesh(layout, device)
    everyone = dist.group.WORLD
    assert everyone is not None
    node, world = node_name(), tuple(range(dist.get_world_size()))
    seconds = _time("all_reduce", 1 << 20, everyone, device)
    samples = [Sample("world", "all_reduce", world, node, 1 << 20, seconds, 0.0)]
    for line in largest(ledger):
        group = mesh.group(GROUPS[line.axis])
        size_bytes = min(line.bytes, LARGEST_BYTES)
        planned = line.seconds / line.count * size_bytes / line.bytes
        seconds = _time(line.collective, size_bytes, group, device)
        ranks = tuple(dist.get_process_group_ranks(group))
        samples.append(Sample(line.axis, line.collective, ranks, node, size_bytes, seconds, planned))
    return samples


def largest(ledger: Sequence[Collective]) -> list[Collective]:
    """The largest line of each kind of collective on each axis, in an order that all ranks share.

    Lines over products of axes are left out: they use the links of the axes that they are made of.
    """
    kept: dict[tuple[str, str], Collective] = {}
    for line in ledger:
        key = (line.axis, line.collective)
        measurable = line.collective in MEASURED and line.group_size > 1 and line.bytes and line.count
        if measurable and line.axis in GROUPS and (key not in kept or line.bytes > kept[key].bytes):
            kept[key] = line
    return [kept[key] for key in sorted(kept)]


def slow_nodes(samples: Sequence[Sample]) -> tuple[str, ...]:
    """Nodes that are in a group much slower than its peers, and in no quick one of the same kind."""
    times: dict[tuple[str, str], dict[tuple[int, ...], float]] = defaultdict(dict)
    nodes: dict[tuple[int, ...], set[str]] = defaultdict(set)
    for sample in samples:
        groups = times[sample.axis, sample.collective]
        groups[sample.group] = max(groups.get(sample.group, 0.0), sample.seconds)
        nodes[sample.group].add(sample.node)
    suspects: set[str] = set()
    for groups in times.values():
        limit = SLOW * statistics.median(groups.values())
        quick = {node for group, seconds in groups.items() if seconds <= limit for node in nodes[group]}
        slow = {node for group, seconds in groups.items() if seconds > limit for node in nodes[group]}
        suspects |= slow - quick
    return tuple(sorted(suspects))


def table(samples: Sequence[Sample]) -> Table:
    """Measured against planned, by axis and collective."""
    headings = ("axis", "collective", "ranks", "MB", "planned ms", "median ms", "slowest ms", "bus GB/s", "")
    shown = Table(*headings, title="Fabric", title_justify="left")
    lines: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for sample in samples:
        lines[sample.axis, sample.collective].append(sample)
    for (axis, collective), line in lines.items():
        seconds = [sample.seconds for sample in line]
        planned = line[0].planned_seconds
        late = planned > 0 and statistics.median(seconds) > LATE * planned
        shown.add_row(
            axis,
            collective,
            str(len(line[0].group)),
            f"{line[0].bytes / 1e6:.1f}",
            f"{planned * 1e3:.2f}" if planned else "",
            f"{statistics.median(seconds) * 1e3:.2f}",
            f"{max(seconds) * 1e3:.2f}",
            f"{bus_bandwidth(line[0], statistics.median(seconds)) / 1e9:.1f}",
            "slower than planned" if late else "",
        )
    return shown


def bus_bandwidth(sample: Sample, seconds: float) -> float:
    """Bytes per second over a link, as nccl-tests count: (n-1)/n of the tensor, for all-reduce twice."""
    ranks = len(sample.group)
    passes = 2 if sample.collective == "all_reduce" else 1
    return passes * (ranks - 1) / ranks * sample.bytes / seconds if seconds else 0.0


def _time(collective: str, size_bytes: int, group: dist.ProcessGroup, device: torch.device) -> float:
    members = group.size()
    elements = max(size_bytes // 4 // members, 1) * members
    whole = torch.ones(elements, device=device)
    shard, received = whole[: elements // members].clone(), torch.empty_like(whole)
    runs: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole, op=dist.ReduceOp.MAX, group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(received, shard, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(shard, whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(received, whole, group=group),
    }
    return time_operation(runs[collective], device, warmup=2, repeats=5).seconds
