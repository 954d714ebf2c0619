"""What a launch target needs to know of a plan: stages as jobs, their size, and how long a save takes."""

from __future__ import annotations

import re
import shlex

from shipway.compiler.frozen import frozen
from shipway.schemas.cluster import Cluster
from shipway.schemas.plan import Plan, StagePlan

SAVE_MARGIN_SECONDS = 120
"""Time beside the writing itself: finishing the step, gathering metadata, a slow file system."""


@frozen
class StageJob:
    """One training stage as one job."""

    number: int
    """From 1, in the order of the programme."""
    name: str
    nodes: int
    processes_per_node: int
    hours: float
    """Planned running time."""

    @property
    def slug(self) -> str:
        """Name for files and schedulers: lower case, letters, digits and dashes."""
        return f"{self.number:02d}-{slug(self.name)}"

    def describe(self, on_gpus: bool) -> str:
        """Its size in words."""
        one, many = ("GPU", "GPUs") if on_gpus else ("process", "processes")
        unit = one if self.processes_per_node == 1 else many
        return f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.processes_per_node} {unit}"


@frozen
class Programme:
    """A whole plan as jobs."""

    name: str
    plan_hash: str
    regenerate: str
    """Command that writes the build folder again."""
    cluster: Cluster
    stages: tuple[StageJob, ...]
    save_seconds: int
    """How long before the end of a job it must be told to save."""

    @property
    def slug(self) -> str:
        """The name, as schedulers take it."""
        return slug(self.name)

    @property
    def on_gpus(self) -> bool:
        """Whether devices are accelerators that a scheduler hands out."""
        return self.cluster.device.kind != "cpu"

    @property
    def largest(self) -> StageJob:
        """The stage that needs most nodes."""
        return max(self.stages, key=lambda stage: (stage.nodes, stage.processes_per_node))


SLUG_LENGTH = 40
"""Leaves room in 63 letters for what controllers append: the job, the node's number, a random tail."""
_TAIL = re.compile(r"-\d{8}-\d{6}(-\d+)?$")


def slug(name: str) -> str:
    """`name` as an RFC 1123 label: what Kubernetes takes, and so everyone.

    Of a long name the middle goes: a run's time at its end tells it from others.
    """
    kept = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in name.lower())
    tail = found.group() if (found := _TAIL.search(kept)) else ""
    head = kept.removesuffix(tail).strip("-")[: SLUG_LENGTH - len(tail)].rstrip("-")
    return f"{head}{tail}"


def programme(plan: Plan) -> Programme:
    """The jobs of `plan`."""
    cluster = plan.blueprint.cluster
    stages = tuple(_stage_job(number, stage, cluster) for number, stage in enumerate(plan.stages, 1))
    origin = shlex.join(plan.origin) if plan.origin else f"build/{plan.name}/plan.json"
    return Programme(
        name=plan.name,
        plan_hash=plan.hash,
        regenerate=f"shipway build {origin}",
        cluster=cluster,
        stages=stages,
        save_seconds=save_seconds(plan),
    )


def _stage_job(number: int, stage: StagePlan, cluster: Cluster) -> StageJob:
    world_size = stage.layout.world_size
    nodes = -(-world_size // cluster.devices_per_node)
    return StageJob(number, stage.name, nodes, world_size // nodes, stage.hours)


def checkpoint_bytes(plan: Plan) -> int:
    """Size of a checkpoint: master parameters, and two moments for AdamW or one for Muon.

    Muon keeps two for what it hands to AdamW (embeddings, head), so its figure is an upper bound with two.
    """
    precision = plan.blueprint.training.precision
    width = {"fp32": 4, "bf16": 2}
    return plan.parameters.total * (width[precision.master] + 2 * width[precision.optimizer])


def save_seconds(plan: Plan) -> int:
    """Time from the request to stop until the checkpoint is on storage, rounded up to a minute.

    One step may have to end first, then the checkpoint goes out at the storage's write bandwidth.
    """
    write_seconds = checkpoint_bytes(plan) / plan.blueprint.cluster.storage.write_bandwidth
    step_seconds = max(stage.step_seconds for stage in plan.stages)
    return -(-int(write_seconds + step_seconds + SAVE_MARGIN_SECONDS) // 60) * 60
