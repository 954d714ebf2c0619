"""Efficiency figures: how much of a device's and a network's peak real kernels reach.

Every curve is `ceiling * x / (x + half)`: `half` is the size at which half of the ceiling is reached.
"""

from pydantic import Field, NonNegativeFloat, PositiveFloat

from shipway.schemas.base import Schema
from shipway.schemas.measurement import Environment


class Curve(Schema):
    """A saturating efficiency: `ceiling * x / (x + half)`."""

    ceiling: PositiveFloat
    """Share of the peak at large x."""
    half: NonNegativeFloat
    """x at which half of the ceiling is reached."""


class Efficiency(Schema):
    """One kind of device."""

    gemm: Curve
    """Share of the arithmetic peak of a matrix product; x is its smaller of rows and columns."""
    gemm_inner: Curve
    """Further share for a short inner dimension; x is the inner dimension."""
    grouped_gemm: Curve
    """Share of the peak of a grouped product (experts); x is the rows of one group."""
    fp8_gemm: Curve = Curve(ceiling=0.67, half=290)
    """Share of the fp8 peak of a product scaled by row; x as for `gemm`."""
    fp8_cast: PositiveFloat = 0.57
    """Share of the memory bandwidth that rounding to fp8 reaches."""
    attention_forward: Curve
    """Share of the peak of causal attention's forward; x is the keys. Narrow heads scale it down."""
    attention_backward: Curve
    """The same for backward, counted as 2.5 times the forward (flash attention recomputes)."""
    delta_bounded_forward: Curve
    """Share of the peak of the bounded delta rule's forward; x is tokens x heads of one call."""
    delta_bounded_backward: Curve
    """The same for backward, counted as twice the forward."""
    delta_unbounded_forward: Curve
    delta_unbounded_backward: Curve
    memory: PositiveFloat
    """Share of the peak memory bandwidth that a streaming kernel reaches."""
    eager_elementwise: PositiveFloat
    """Time of a step's memory-bound kernels over that of streaming the bytes that the catalogue counts."""
    orthogonalisation: PositiveFloat
    """Share of the peak that Newton-Schulz products reach."""
    kernel_seconds: NonNegativeFloat
    """Shortest time of one kernel on the device."""
    host_seconds: NonNegativeFloat
    """Host time to issue one operation, autograd and module hooks included."""
    scale_up: Curve
    """Share of the scale-up bandwidth; x is the bytes one rank sends in one call."""
    network: Curve
    """Share of the network bandwidth; x likewise."""
    scale_up_latency: NonNegativeFloat
    """Seconds of one step of a collective inside a scale-up domain."""
    network_latency: NonNegativeFloat
    """Seconds that software adds to one step over the network, beyond the cluster's own latency."""
    call_seconds: NonNegativeFloat
    """Host and launch time of one collective."""
    communicator_bytes_scale_up: int
    """Memory outside the allocator of one communicator inside a scale-up domain."""
    communicator_bytes_network: int
    """The same when the group spans the network."""
    library_bytes: int
    """Memory outside the allocator of kernels' modules and library workspaces, beyond the context."""
    upper_outside_bytes: int
    """What must be added outside the allocator for the upper bound."""
    fragmentation: PositiveFloat
    """Reserved over allocated memory in steady state, with expandable segments."""
    fragmentation_upper: PositiveFloat
    """The same for the upper bound."""
    host_copy: PositiveFloat = 0.85
    """Share of the host link that copies from and to pinned memory reach, each way, both at once."""
    activation_error: NonNegativeFloat = 0.03
    """Relative error of kept activations and scratch, for the upper bound."""
    load_percentile: float = Field(default=0.99, gt=0.5, lt=1)
    """Percentile of the largest expert load that time and buffers are planned for."""


class Calibration(Schema):
    """Named efficiency figures of one device type."""

    name: str
    """Where the figures come from, as a plan cites them."""
    estimate: bool
    """Whether no measurement stands behind them."""
    efficiency: Efficiency
    environment: Environment | None = None
    """What the figures were measured on and with, when they were."""
