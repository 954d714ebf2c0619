"""One training stage as the cost model sees it: everything that does not depend on the layout."""

from __future__ import annotations

from collections.abc import Iterator

from shipway.compiler.communication import Network
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.evaluate_states import Bytes, ParameterTable, element_bytes, parameter_table
from shipway.compiler.fabric import fabric
from shipway.compiler.frozen import frozen
from shipway.compiler.held import split_shapes
from shipway.compiler.operators.base import Limit
from shipway.compiler.operators.fp8 import GRANULE, fp8_limits
from shipway.compiler.pictures import with_pictures
from shipway.compiler.space import Space
from shipway.compiler.timing import Fp8, Machine, machine
from shipway.compiler.workload import Workload
from shipway.schemas.blueprint import Blueprint
from shipway.schemas.calibration import Calibration
from shipway.schemas.capability import capability
from shipway.schemas.layout import LayoutConstraints
from shipway.schemas.training import PretrainStage, Training


@frozen(eq=False)
class Problem:
    """A stage of a blueprint on its cluster."""

    blueprint: Blueprint
    stage: PretrainStage
    work: Workload
    machine: Machine
    network: Network
    space: Space
    parameters: ParameterTable
    """Tensors of the model."""

    @property
    def fused(self) -> bool:
        """Whether CUDA kernels run, rather than plain PyTorch."""
        return self.blueprint.cluster.device.kind != "cpu"

    @property
    def sizes(self) -> Bytes:
        """Bytes of an element in each role, and where it is."""
        return element_bytes(self.blueprint.training, self.space.offload)

    @property
    def capacity_bytes(self) -> int:
        """Memory of one device."""
        return self.blueprint.cluster.device.memory

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step, over the whole cluster."""
        return self.space.sequences * self.space.context


def problem(
    blueprint: Blueprint,
    stage: PretrainStage,
    work: Workload,
    calibration: Calibration | None = None,
    parameters: ParameterTable | None = None,
) -> Problem:
    """The stage with the device's rates and the fabric; stages of one blueprint may share `parameters`."""
    cluster, model, training = blueprint.cluster, blueprint.model, blueprint.training
    work = with_pictures(work, model.vision, blueprint.training.data, stage.mix, stage.context)
    figures = calibration or default_calibration(cluster.device)
    rates = machine(cluster.device, figures, training.precision.activations, fp8_rates(blueprint))
    experts = model.feed_forward.experts
    fab = fabric(cluster)
    routed = experts.routed if experts and "experts" in model.feed_forward_kinds() else 0
    pins = constraints(blueprint, stage)
    space = Space(
        devices=cluster.devices,
        devices_per_node=cluster.devices_per_node,
        domain=fab.domain,
        sequences=max(stage.global_batch // stage.context, 1),
        context=stage.context,
        layers=model.layers,
        experts=routed,
        tied=model.tied_embeddings,
        limits=(*work.limits(), *_limits(work, training)),
        granule=GRANULE if training.precision.compute == "fp8" else 1,
        constraints=pins,
        any_size=blueprint.training.objective == "cost",
        delta_heads=model.attention.delta.heads if model.attention.delta else 0,
        predictions=model.multi_token_prediction.depth if model.multi_token_prediction else 0,
        split=split_shapes(p for row in work.rows for p in row.parameters()),
        capability=capability(blueprint.training.precision),
        offload=pins.offload or "none",
    )
    tensors = parameters or parameter_table(work, blueprint.training)
    return Problem(blueprint, stage, work, rates, Network(fab, figures.efficiency), space, tensors)


def fp8_rates(blueprint: Blueprint) -> Fp8 | None:
    """How products run in fp8, where the blueprint asks for it and the device can (rules/precision.py)."""
    training, peak = blueprint.training, blueprint.cluster.device.peak.fp8
    if training.precision.compute != "fp8" or peak is None:
        return None
    return Fp8(peak, training.precision.fp8_smallest, training.compiles_blocks)


def _limits(work: Workload, training: Training) -> Iterator[Limit]:
    """What a degree must divide besides what the model's operators say."""
    if training.precision.compute == "fp8":
        parameters = {p: None for row in work.rows for p in row.parameters()}
        yield from fp8_limits(tuple(parameters), training.precision.fp8_smallest)


def constraints(blueprint: Blueprint, stage: PretrainStage) -> LayoutConstraints:
    """What is pinned for a stage: the stage's own word, else the training section's."""
    training = blueprint.training
    pinned = stage.layout if stage.layout != "auto" else training.layout
    held = LayoutConstraints() if pinned == "auto" else pinned
    size = stage.micro_batch if stage.micro_batch is not None else training.micro_batch
    if held.micro_batch is None and size != "auto":
        held = held.model_copy(update={"micro_batch": size})
    return held
