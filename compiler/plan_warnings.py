"""What a reader of a plan must know before trusting it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from shipway.compiler.render import units
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.calibration import Calibration
from shipway.schemas.capability import CAPABILITY, Capability
from shipway.schemas.layout import Layout
from shipway.schemas.plan import StagePlan


def plan_warnings(
    blueprint: Blueprint,
    calibration: Calibration,
    stages: Sequence[StagePlan],
    capability: Capability = CAPABILITY,
) -> tuple[str, ...]:
    """One sentence for each doubt."""
    return tuple(_warnings(blueprint, calibration, stages, capability))


def _warnings(
    blueprint: Blueprint, calibration: Calibration, stages: Sequence[StagePlan], capability: Capability
) -> Iterator[str]:
    yield from _unproven(stages, capability)
    if calibration.estimate:
        yield f"times are estimates ({calibration.name}): `shipway calibrate` measures your own devices"
    for stage in stages:
        if stage.memory.verdict == "tight":
            yield f"stage {stage.name} is tight: its upper bound exceeds the device's memory"
        yield from _idle(stage, blueprint)
        yield from _offloads(stage, blueprint)
    if blueprint.model.vision is not None:
        yield _pictures(blueprint)
    if blueprint.training.compiles_blocks:
        yield "compiled blocks are planned as if they ran as they are: what they keep and take may be less"


def _pictures(blueprint: Blueprint) -> str:
    """How much of the vision tower's work the figures hold."""
    training = blueprint.training
    seeing = [stage.name for stage in training.stages if training.data.has_images(stage.mix)]
    if not seeing:
        return "the vision tower is planned with its parameters and without images: stages are text"
    stages = f"stage{'s' if len(seeing) > 1 else ''} {', '.join(seeing)}"
    return f"{stages}: memory and time are upper bounds, planned as if pictures filled every row"


def _unproven(stages: Sequence[StagePlan], capability: Capability) -> Iterator[str]:
    """All unproven axes of the plan in one line."""
    names, concerned = [], set()
    for support in capability.axes:
        using = [stage.name for stage in stages if degree(stage.layout, support.axis) > 1]
        if using and not support.proven:
            names.append(support.name)
            concerned.update(using)
    if names:
        where = ", ".join(stage.name for stage in stages if stage.name in concerned)
        yield (
            f"nothing has shown yet that {_listed(names)} (stages {where}) trains to the same losses as one"
            " device: compare them with `make parity` before you rely on this plan"
        )


def _idle(stage: StagePlan, blueprint: Blueprint) -> Iterator[str]:
    """Devices that a stage has no work for, and what they cost when they are held all the same."""
    held, used = blueprint.cluster.devices, stage.devices_used
    if used == held:
        return
    text = (
        f"stage {stage.name} leaves {held - used:,} of {held:,} devices idle, as no layout that divides its"
        f" {stage.sequences_per_step:,} sequences a step is faster on more of them"
    )
    if stage.cost:
        text += (
            f"; its cost of {units.money(stage.cost)} is that of the {used:,} used,"
            f" the whole cluster held for it costs {units.money(stage.cost * held / used)}"
        )
    yield text


def _offloads(stage: StagePlan, blueprint: Blueprint) -> Iterator[str]:
    """That something waits in host memory unasked, and where that gains nothing."""
    offload = stage.layout.offload
    if offload == "none":
        return
    if blueprint.cluster.device.kind == "cpu":
        yield f"stage {stage.name} offloads to the memory that its device has anyway: it saves nothing"
        return
    entry = blueprint.training.stage(stage.name)
    pins = entry.layout if entry.layout != "auto" else blueprint.training.layout
    if pins == "auto" or pins.offload is None:
        what = {"optimizer": "optimizer state", "activations": "activations"}.get(
            offload, "optimizer state and activations"
        )
        yield f"stage {stage.name} keeps {what} in host memory, as nothing fits its devices without"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def degree(layout: Layout, axis: str) -> int:
    """Degree of a mesh axis in a layout."""
    return {
        "pp": layout.pipeline_parallel,
        "dp_replicate": layout.data_parallel_replicate,
        "dp_shard": layout.data_parallel_shard,
        "cp": layout.context_parallel,
        "tp": layout.tensor_parallel,
        "ep": layout.expert_parallel,
    }[axis]
