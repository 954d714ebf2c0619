"""What `shipway calibrate` read off a machine: rows of timed operations, and where they were timed."""

from typing import Literal

from pydantic import Field, NonNegativeFloat, NonNegativeInt

from shipway.schemas.base import Schema

Operation = Literal[
    "gemm",
    "grouped_gemm",
    "fp8_gemm",
    "fp8_cast",
    "fp8_linear",
    "attention",
    "documents_attention",
    "delta_rule",
    "copy",
    "elementwise",
    "training_step",
    "host_to_device",
    "device_to_host",
    "launch",
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "all_to_all",
    "send_receive",
]


class Row(Schema):
    """One operation at one size: the median of repeated runs.

    A `training_step` is the memory-bound kernels of a whole step, and the bytes that the catalogue counts
    for them.
    """

    operation: Operation
    phase: Literal["forward", "backward"] = "forward"
    sizes: dict[str, int]
    """Dimensions by name: rows, inner, columns, groups, tokens, heads, key_width, value_width, ..."""
    flops: NonNegativeFloat = 0.0
    """Matrix-product FLOPs of one run, counted as the operator catalogue counts them."""
    bytes: NonNegativeFloat = 0.0
    """Bytes one run must move: device memory, or the whole tensor of a collective."""
    seconds: NonNegativeFloat
    """Median of one run."""
    spread: NonNegativeFloat = 0.0
    """(90th - 10th percentile) / median."""


class Environment(Schema):
    """What the rows were measured on and with."""

    device: str
    """Name as the driver reports it."""
    devices: int
    """Devices that took part."""
    torch: str
    cuda: str | None = None
    kernels: dict[str, str] = Field(default={})
    """Implementation of each dispatched operation."""
    date: str
    """ISO date."""
    command: str
    """Command that measured."""


class Measurements(Schema):
    """One calibration run."""

    format: Literal[1] = 1
    name: str
    environment: Environment
    memory_bytes: NonNegativeInt
    """Total memory of one device, as the driver reports it to a program."""
    context_bytes: NonNegativeInt
    """Memory outside the allocator once context, libraries and one communicator are up."""
    rows: tuple[Row, ...]
