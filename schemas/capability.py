"""What this version's runtime can run: the planner offers nothing else, the runtime checks plans by it."""

from typing import Literal

from shipway.schemas.base import Schema
from shipway.schemas.layout import V_SHAPED, Offload, Recompute, Schedule, Zero
from shipway.schemas.training import Precision

MeshAxis = Literal["pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"]


class AxisSupport(Schema):
    """One mesh axis."""

    axis: MeshAxis
    name: str
    """Name in the user's words."""
    field: str
    """Field of the layout that sets its degree."""
    proven: bool
    """Whether the parity suite holds it equal to one device; an unproven axis is planned with a warning."""


class Capability(Schema):
    """Axes, schedules and policies that the runtime runs."""

    axes: tuple[AxisSupport, ...]
    schedules: tuple[Schedule, ...]
    """Schedules of more than one pipeline rank, as torch.distributed.pipelining names them."""
    schedules_because: str = ""
    """Why some schedules are missing from them."""
    recompute: tuple[Recompute, ...]
    zero: tuple[Zero, ...]
    """ZeRO levels without a pipeline; above 1 gradients are reduce-scattered after every micro-batch."""
    zero_with_pipeline: tuple[Zero, ...]
    """ZeRO levels under a pipeline: torch's stages keep parameters gathered and gradients whole over all
    micro-batches of a step and reduce them once, which is level 1."""
    active_stages_gathered: int
    """Model chunks of one pipeline rank that torch's interleaved schedule keeps gathered at a time."""
    receive_buffers: Literal["per_micro_batch", "in_flight"]
    """Receive buffers of a pipeline stage: torch allocates one per micro-batch, not one per micro-batch in
    flight."""
    virtual_stages: int
    """Largest number of model chunks on one pipeline rank."""
    offload: tuple[Offload, ...]
    """What can be kept in host memory; activations only with recomputation of whole layers."""
    offload_slice_elements: int
    """Elements of each kind of optimizer state that are on the device at a time, twice over: one slice is
    updated while the next arrives and the last leaves."""

    def support(self, axis: str) -> AxisSupport | None:
        """The statement on one axis, or None when the runtime can't run it."""
        return next((entry for entry in self.axes if entry.axis == axis), None)


def _axis(axis: MeshAxis, name: str, field: str, proven: bool) -> AxisSupport:
    return AxisSupport(axis=axis, name=name, field=field, proven=proven)


CAPABILITY = Capability(
    axes=(
        _axis("pp", "pipeline parallel", "pipeline_parallel", True),
        _axis("dp_replicate", "replicated data parallel", "data_parallel_replicate", True),
        _axis("dp_shard", "sharded data parallel", "data_parallel_shard", True),
        _axis("cp", "context parallel", "context_parallel", True),
        _axis("tp", "tensor parallel", "tensor_parallel", True),
        _axis("ep", "expert parallel", "expert_parallel", True),
    ),
    schedules=("1f1b", "interleaved_1f1b", "zbv", "dualpipev"),
    recompute=("none", "selective", "full"),
    zero=(1, 2, 3),
    zero_with_pipeline=(1,),
    active_stages_gathered=3,
    receive_buffers="per_micro_batch",
    virtual_stages=8,
    offload=("none", "optimizer", "activations", "both"),
    offload_slice_elements=16 * 2**20,
)

FP8_CAPABILITY = CAPABILITY.model_copy(
    update={
        "schedules": tuple(name for name in CAPABILITY.schedules if name not in V_SHAPED),
        "schedules_because": "with training.precision.compute: fp8 a linear makes the gradients of input and"
        " weight at once, so that a schedule that puts weights' gradients off would compute both twice",
    }
)
"""What is left of it where products run in fp8."""


def capability(precision: Precision) -> Capability:
    """What the runtime can run in these number formats."""
    return FP8_CAPABILITY if precision.compute == "fp8" else CAPABILITY
