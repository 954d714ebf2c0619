"""What `shipway verify` read off the devices: a few steps of a build, measured as a plan states them."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from shipway.schemas.base import Schema
from shipway.schemas.layout import Layout

Outcome = Literal["measured", "out of memory", "failed"]


class RankMemory(Schema):
    """Peak memory of one rank in steady state."""

    rank: int
    pipeline_rank: int
    allocated_bytes: NonNegativeInt
    """torch.cuda.max_memory_allocated."""
    reserved_bytes: NonNegativeInt
    """torch.cuda.max_memory_reserved."""
    outside_bytes: NonNegativeInt
    """Used on the device beyond what the allocator holds; of a device that nothing else uses."""
    parameter_bytes: NonNegativeInt = 0
    """Master weights that the rank holds."""
    optimizer_bytes: NonNegativeInt = 0
    """The optimizer's state, and the moving average if there is one."""
    gradient_bytes: NonNegativeInt = 0
    """Gradients after the last micro-batch."""
    kept_bytes: NonNegativeInt = 0
    """What one micro-batch's forward leaves for backward; 0 under a pipeline."""
    phase_peak_bytes: dict[str, NonNegativeInt] = Field(default={})
    """Peak of allocated bytes in each phase of a step."""
    holder_bytes: dict[str, NonNegativeInt] = Field(default={})
    """What a step allocates and holds at its peak, by line of code, largest first."""


class StageReading(Schema):
    """One training stage of one build, run for a few steps."""

    build: str
    """Folder of the build, as it was given."""
    plan_hash: str
    stage: str
    layout: Layout
    outcome: Outcome
    detail: str = ""
    """Why it failed, or what was asked for when memory ran out."""
    steps: NonNegativeInt = 0
    """Steps behind the medians."""
    ranks: tuple[RankMemory, ...] = ()
    step_seconds: NonNegativeFloat = 0.0
    """Median of a step."""
    phase_seconds: dict[str, NonNegativeFloat] = Field(default={})
    """Of one step whose phases were waited for: `forward and backward`, `update`."""
    kernel_seconds: dict[str, NonNegativeFloat] = Field(default={})
    """Of rank 0's forward and backward: kernels' time by the plan's categories of compute, and `idle`."""
    communication_seconds: dict[str, NonNegativeFloat] = Field(default={})
    """Of rank 0's forward and backward: collectives' time by mesh axis."""
    kernels: NonNegativeInt = 0
    """Kernels that rank 0's forward and backward launched."""
    slowest_kernels: dict[str, NonNegativeFloat] = Field(default={})
    """Seconds of the kernels that took longest there, by name."""


class Readings(Schema):
    """One verification on one machine."""

    format: Literal[1] = 1
    device: str
    """Name as the driver reports it."""
    devices: int
    torch: str
    date: str
    """ISO date."""
    command: str
    stages: tuple[StageReading, ...]
