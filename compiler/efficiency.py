"""Default efficiency figures per device type, until `shipway calibrate` has measured the user's own.

The H200 figures were read on one H200 (torch 2.11, CUDA 13.0, fla-core 0.6.0). Devices of the same
architecture take them over; others scale by their own peaks, which a plan says.
"""

from __future__ import annotations

from shipway.schemas.calibration import Calibration, Curve, Efficiency
from shipway.schemas.cluster import Device

_GIB = 2**30


def _curve(ceiling: float, half: float) -> Curve:
    return Curve(ceiling=ceiling, half=half)


def _hopper() -> Efficiency:
    return Efficiency(
        gemm=_curve(0.74, 120),
        gemm_inner=_curve(1.0, 60),
        # 404, 526 and 620 TFLOP/s at 128, 256 and 512 rows of 989 peak.
        grouped_gemm=_curve(0.76, 111),
        # 535 and 585 TFLOP/s at 8K and 32K keys; backward 428 and 471.
        attention_forward=_curve(0.61, 1040),
        attention_backward=_curve(0.49, 1135),
        # 32 heads of 128, bounded: 1.45 + 3.62 ms at 8K tokens, 7.3 + 28.2 at 64K, 29.0 + 112.2 at 256K.
        delta_bounded_forward=_curve(0.0373, 159_000),
        delta_bounded_backward=_curve(0.0192, 8_000),
        delta_unbounded_forward=_curve(0.0335, 14_000),
        delta_unbounded_backward=_curve(0.0157, 7_000),
        memory=0.9,
        eager_elementwise=1.3,
        orthogonalisation=0.5,
        kernel_seconds=2.5e-6,
        host_seconds=9e-6,
        scale_up=_curve(0.80, 2_000_000),
        network=_curve(0.85, 500_000),
        scale_up_latency=1.5e-6,
        network_latency=8e-6,
        call_seconds=15e-6,
        communicator_bytes_scale_up=250 * 2**20,
        communicator_bytes_network=500 * 2**20,
        library_bytes=int(0.6 * _GIB),
        upper_outside_bytes=2 * _GIB,
        fragmentation=1.03,
        fragmentation_upper=1.09,
    )


def _cpu() -> Efficiency:
    return Efficiency(
        gemm=_curve(0.6, 60),
        gemm_inner=_curve(1.0, 32),
        grouped_gemm=_curve(0.3, 30),
        attention_forward=_curve(0.3, 60),
        attention_backward=_curve(0.2, 60),
        delta_bounded_forward=_curve(0.05, 1000),
        delta_bounded_backward=_curve(0.03, 1000),
        delta_unbounded_forward=_curve(0.03, 1000),
        delta_unbounded_backward=_curve(0.02, 1000),
        memory=0.5,
        eager_elementwise=2.0,
        orthogonalisation=0.3,
        kernel_seconds=3e-6,
        host_seconds=15e-6,
        scale_up=_curve(0.3, 200_000),
        network=_curve(0.7, 200_000),
        scale_up_latency=40e-6,
        network_latency=60e-6,
        call_seconds=100e-6,
        communicator_bytes_scale_up=8 * 2**20,
        communicator_bytes_network=8 * 2**20,
        library_bytes=300 * 2**20,
        upper_outside_bytes=300 * 2**20,
        fragmentation=1.1,
        fragmentation_upper=1.5,
        activation_error=0.15,
    )


def default_calibration(device: Device) -> Calibration:
    """The figures to plan with when the user has measured none."""
    if device.kind == "cpu":
        return Calibration(name="cpu estimate", estimate=True, efficiency=_cpu())
    measured = device.name.lower().startswith("h200")
    same_architecture = any(device.name.lower().startswith(name) for name in ("h100", "h800", "h20", "gh200"))
    if measured:
        name = "h200, measured 2026-11-30"
    elif same_architecture:
        name = f"{device.name}: shares of peak taken from h200, measured 2026-11-30"
    else:
        name = f"{device.name}: estimate, shares of peak taken from h200"
    return Calibration(name=name, estimate=not measured, efficiency=_hopper())
