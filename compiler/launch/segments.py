"""Consecutive stages of one size: one job trains them all, as the runtime goes from stage to stage."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.job import Programme, StageJob


@frozen
class Segment:
    """Stages that one job trains."""

    job: str
    """Name of the job."""
    stage: StageJob
    """The last of them: training runs until its end."""
    stages: tuple[str, ...]
    """Names of all of them."""


def segments(programme: Programme) -> tuple[Segment, ...]:
    """The programme cut wherever the number of nodes or of processes on a node changes."""
    groups: list[list[StageJob]] = []
    for stage in programme.stages:
        size = (stage.nodes, stage.processes_per_node)
        if groups and (groups[-1][0].nodes, groups[-1][0].processes_per_node) == size:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    names = ["train"] if len(groups) == 1 else [f"train-{number}" for number in range(1, len(groups) + 1)]
    return tuple(
        Segment(name, group[-1], tuple(stage.name for stage in group))
        for name, group in zip(names, groups, strict=True)
    )
