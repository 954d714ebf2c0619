"""Everything that a build folder holds for launching: `launch/` and `container/`."""

from __future__ import annotations

from shipway.compiler.launch import environment
from shipway.compiler.launch.container import container_files
from shipway.compiler.launch.job import Programme, programme
from shipway.compiler.launch.targets import target_named
from shipway.compiler.launch.templates import fill
from shipway.schemas.plan import Plan


def launch_files(plan: Plan) -> dict[str, str]:
    """Text of each file, by path relative to the build folder; the same plan gives the same bytes."""
    jobs = programme(plan)
    kind = jobs.cluster.target.kind
    files = {f"launch/{path}": text for path, text in target_named(kind).render(jobs).items()}
    if kind != "local":
        files["launch/node.sh"] = node_script(jobs)
    return files | container_files(plan, jobs)


def node_script(jobs: Programme) -> str:
    """What every node of a multi-node target runs."""
    names: dict[int, list[str]] = {}
    for stage in jobs.stages:
        names.setdefault(stage.processes_per_node, []).append(stage.name)
    return fill(
        "launch/node.sh.j2",
        name=jobs.name,
        plan_hash=jobs.plan_hash,
        regenerate=jobs.regenerate,
        sizes=sorted(names.items()),
        layers=environment.layers(jobs),
        on_gpus=jobs.on_gpus,
        save_seconds=jobs.save_seconds,
    )
