"""Seconds of kernels on one device: a roofline with an efficiency curve per kind of kernel.

Everything is vectorised: a kernel's sizes may be arrays over layouts.
"""

from __future__ import annotations

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Attention,
    Cast,
    DeltaRule,
    Elementwise,
    Gemm,
    Kernel,
    Number,
    forward_flops,
)
from shipway.schemas.calibration import Calibration, Curve, Efficiency
from shipway.schemas.cluster import Device

ATTENTION_BACKWARD_WORK = 2.5
"""Flash attention's backward does five products for the forward's two (arXiv 2307.08691)."""

CATEGORIES = (
    "matrix products",
    "expert products",
    "attention",
    "delta attention",
    "memory-bound work",
    "rounding to fp8",
)
"""What compute time is broken down by."""


@frozen
class Fp8:
    """How projections' products run in fp8."""

    peak_flops: float
    smallest: int
    """Narrowest projection that does."""
    casts_fused: bool
    """Whether rounding is compiled."""


@frozen
class Machine:
    """Rates of one device as real kernels reach them."""

    peak_flops: float
    memory_bandwidth: float
    element_bytes: int
    efficiency: Efficiency
    host_bandwidth: float
    """Bytes a second between host and device, each direction."""
    fp8: Fp8 | None = None
    """Set where some products run in fp8."""

    def fp8_gemm_seconds(self, rows: Number, inner: Number, columns: Number) -> Number:
        """Seconds of a product of operands in fp8; its output is in bf16."""
        assert self.fp8 is not None
        e = self.efficiency
        share = reached(e.fp8_gemm, np.minimum(rows, columns)) * reached(e.gemm_inner, inner)
        compute = 2.0 * rows * inner * columns / (self.fp8.peak_flops * np.maximum(share, 1e-6))
        moved = rows * inner + inner * columns + rows * columns * self.element_bytes
        return np.maximum(compute, self.memory_seconds(moved)) + e.kernel_seconds

    def gemm_seconds(
        self, rows: Number, inner: Number, columns: Number, groups: Number, grouped: bool
    ) -> Number:
        """Seconds of `groups` products rows x inner by inner x columns."""
        e = self.efficiency
        work = 2.0 * rows * inner * columns * groups
        if grouped:
            share = reached(e.grouped_gemm, rows) * reached(e.gemm_inner, narrowest(inner, columns))
        else:
            share = reached(e.gemm, np.minimum(rows, columns)) * reached(e.gemm_inner, inner)
        moved = (rows * inner + inner * columns + rows * columns) * groups * self.element_bytes
        compute = work / (self.peak_flops * np.maximum(share, 1e-6))
        return np.maximum(compute, self.memory_seconds(moved)) + e.kernel_seconds

    def memory_seconds(self, moved_bytes: Number) -> Number:
        """Seconds to stream `moved_bytes` from and to device memory."""
        return moved_bytes / (self.memory_bandwidth * self.efficiency.memory)


def machine(device: Device, calibration: Calibration, compute: str, fp8: Fp8 | None = None) -> Machine:
    """Rates of `device` computing in bf16 or fp32, and in fp8 beside."""
    return Machine(
        peak_flops=device.peak.bf16 if compute == "bf16" else device.peak.fp32,
        memory_bandwidth=device.memory_bandwidth,
        element_bytes=2 if compute == "bf16" else 4,
        efficiency=calibration.efficiency,
        host_bandwidth=device.host_bandwidth * calibration.efficiency.host_copy,
        fp8=fp8,
    )


def narrowest(inner: Number, columns: Number) -> Number:
    """What of an expert's matrix limits its product: each side is cut into few tiles."""
    return np.minimum(inner, columns)


def reached(curve: Curve, x: Number) -> Number:
    """Share of the peak at size `x`."""
    return curve.ceiling * x / (x + curve.half)


@frozen
class KernelTime:
    """Seconds of one kernel in one micro-batch."""

    category: int
    """Index into CATEGORIES."""
    forward: Number
    backward: Number
    launches: int
    """Operations that the host issues in forward; backward issues about twice as many."""
    weight: Number = 0.0
    """Of backward, the part that makes the gradient of a matrix, which zero-bubble schedules put off."""


def kernel_time(kernel: Kernel, machine: Machine) -> KernelTime:
    """Forward and backward seconds of a kernel."""
    match kernel:
        case Gemm(fp8=True):
            return _fp8_gemm(kernel, machine)
        case Gemm():
            return _gemm(kernel, machine)
        case Attention():
            return _attention(kernel, machine)
        case DeltaRule():
            return _delta_rule(kernel, machine)
        case Elementwise():
            e = machine.efficiency
            floor = kernel.kernels * e.kernel_seconds
            forward = machine.memory_seconds(kernel.forward_bytes) * e.eager_elementwise
            backward = machine.memory_seconds(kernel.backward_bytes) * e.eager_elementwise
            return KernelTime(4, np.maximum(forward, floor), np.maximum(backward, floor), kernel.kernels)
        case Cast():
            e, rate = machine.efficiency, machine.memory_bandwidth * machine.efficiency.fp8_cast
            floor = kernel.kernels * e.kernel_seconds
            forward = np.maximum(kernel.forward_bytes / rate, floor)
            return KernelTime(5, forward, np.maximum(kernel.backward_bytes / rate, 2 * floor), kernel.kernels)


def _fp8_gemm(kernel: Gemm, machine: Machine) -> KernelTime:
    rows, inner, columns = kernel.rows, kernel.inner, kernel.columns
    weight = machine.fp8_gemm_seconds(columns, rows, inner)
    data = machine.fp8_gemm_seconds(rows, columns, inner)
    # One autograd function makes both gradients: no schedule can put the weight's off.
    return KernelTime(0, machine.fp8_gemm_seconds(rows, inner, columns), weight + data, 1)


def _gemm(kernel: Gemm, machine: Machine) -> KernelTime:
    rows, inner, columns = kernel.rows, kernel.inner, kernel.columns
    if machine.element_bytes == 2:
        columns = columns * kernel.parts
    forward = machine.gemm_seconds(rows, inner, columns, kernel.groups, kernel.grouped)
    if kernel.grouped:
        # The weight gradient's inner dimension is the rows of one expert; its tiles are few but full.
        weight = machine.gemm_seconds(rows, inner, columns, kernel.groups, True)
    else:
        weight = machine.gemm_seconds(columns, rows, inner, kernel.groups, False)
    data = (
        machine.gemm_seconds(rows, columns, inner, kernel.groups, kernel.grouped)
        if kernel.input_gradient
        else 0.0
    )
    apart = 0.0 if kernel.gradients_in_forward else weight
    return KernelTime(1 if kernel.grouped else 0, forward, weight + data, 1, apart)


def _attention(kernel: Attention, machine: Machine) -> KernelTime:
    e = machine.efficiency
    work = forward_flops(kernel)
    forward = work / (machine.peak_flops * reached(e.attention_forward, kernel.keys))
    backward = (
        ATTENTION_BACKWARD_WORK * work / (machine.peak_flops * reached(e.attention_backward, kernel.keys))
    )
    return KernelTime(2, forward + e.kernel_seconds, backward + e.kernel_seconds, 4)


def _delta_rule(kernel: DeltaRule, machine: Machine) -> KernelTime:
    e = machine.efficiency
    size = kernel.tokens * kernel.heads
    work = forward_flops(kernel)
    ahead = e.delta_bounded_forward if kernel.bounded else e.delta_unbounded_forward
    back = e.delta_bounded_backward if kernel.bounded else e.delta_unbounded_backward
    forward = work / (machine.peak_flops * reached(ahead, size))
    backward = 2 * work / (machine.peak_flops * reached(back, size))
    return KernelTime(3, forward + 8 * e.kernel_seconds, backward + 12 * e.kernel_seconds, 10)
