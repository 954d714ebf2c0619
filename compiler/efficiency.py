"""Default efficiency figures per device type, until `shipway calibrate` has measured the user's own.

The H200 figures were read on one H200 (torch 2.11, CUDA 13.0, fla-core 0.6.0). Devices of the same
architecture take them over; others scale by their own peaks, which a plan says.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from shipway.schemas.calibration import Calibration, Curve, Efficiency
from shipway.schemas.cluster import Device

_GIB = 2**30
MEASURED = "h200, measured 2026-11-30"


def _curve(ceiling: float, half: float) -> Curve:
    return Curve(ceiling=ceiling, half=half)


def _hopper() -> Efficiency:
    return Efficiency(
        # 694 TFLOP/s at 8192^3 sustained; 787 at 4096^3 only in short bursts, before the clock falls.
        gemm=_curve(0.72, 200),
        gemm_inner=_curve(1.0, 80),
        # 1,400 to 1,570 TFLOP/s of 1,979 in bursts on an H200, lowered by as much as bf16's are; casts move
        # 1.5 to 2.7 TB/s along memory and 2.8 to 3.6 across it, of 4.8.
        fp8_gemm=_curve(0.67, 290),
        fp8_cast=0.57,
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
        eager_elementwise=2.0,
        orthogonalisation=0.33,  # whole updates of two drawn models on an H200
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
        fragmentation=1.0,
        fragmentation_upper=1.04,
    )


@cache
def _h200() -> Calibration:
    """What `shipway calibrate h200` wrote from bench/results/h200.rows.json."""
    text = (Path(__file__).parent / "calibrations" / "h200.json").read_text(encoding="utf-8")
    return Calibration.model_validate_json(text)


def _blackwell() -> Efficiency:
    """Hopper's kernels reach a smaller share of Blackwell's peak (public bf16 GEMMs: 1.3 to 1.5 PFLOP/s of
    2.25; attention's exponentials did not speed up as its products did)."""
    return _hopper().model_copy(
        update={
            "gemm": _curve(0.62, 300),
            "fp8_gemm": _curve(0.58, 430),
            "grouped_gemm": _curve(0.60, 220),
            "attention_forward": _curve(0.40, 1500),
            "attention_backward": _curve(0.32, 1500),
            "memory": 0.85,
        }
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
    name = device.name.lower()
    if name.startswith("h200"):
        return _h200()
    if name.startswith(("b200", "b300", "gb200", "gb300")):
        source = f"{device.name}: estimate from public figures"
        return Calibration(name=source, estimate=True, efficiency=_blackwell())
    relation = "same architecture as" if name.startswith(("h100", "h800", "h20", "gh200")) else "estimate, as"
    source = f"{device.name}: shares of peak, {relation} {MEASURED}"
    return Calibration(name=source, estimate=True, efficiency=_hopper())
