"""From measured operations to the efficiency curves that a plan's times are worked out with.

A curve `ceiling * x / (x + half)` is a straight line in 1/x when turned over:
1/share = 1/ceiling + (half/ceiling)/x, which least squares fits without a starting point.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from shipway.compiler.efficiency import default_calibration
from shipway.compiler.timing import ATTENTION_BACKWARD_WORK, narrowest, reached
from shipway.schemas.calibration import Calibration, Curve, Efficiency
from shipway.schemas.cluster import Device
from shipway.schemas.measurement import Measurements, Row

HOST_WORK = 19
"""Launches of a plain operation that one operation of the catalogue costs the host, with autograd, modules'
hooks and FSDP's: by steps that waited for the host (bench/results/h200-throughput.json)."""
ROUNDS = 20
"""Size and inner dimension of products are fitted in turns."""
LARGE_BYTES = 2**26
"""Copies from this size on tell the memory bandwidth."""

Point = tuple[float, float]
"""(x, share of the peak)."""


def calibrate(measured: Measurements, device: Device) -> Calibration:
    """Curves of `device` from what was measured on it; what was not measured keeps its default."""
    base = default_calibration(device).efficiency
    peak = device.peak.fp32 if device.kind == "cpu" else device.peak.bf16
    gemm, inner = _products(measured.rows, peak, base)
    updates: dict[str, Any] = {
        "gemm": gemm,
        "gemm_inner": inner,
        "grouped_gemm": fit_curve(_grouped_points(measured.rows, peak, inner), base.grouped_gemm),
        "attention_forward": fit_curve(
            _points(measured.rows, "attention", "forward", peak, _keys), base.attention_forward
        ),
        "attention_backward": fit_curve(
            # Rows count backward as twice the forward, the cost model as what flash attention does.
            [
                (x, share * ATTENTION_BACKWARD_WORK / 2)
                for x, share in _points(measured.rows, "attention", "backward", peak, _keys)
            ],
            base.attention_backward,
        ),
        **_fp8(measured.rows, device, base, inner),
        **_delta_curves(measured.rows, peak, base),
        **_memory(measured, device, base),
        "scale_up": fit_curve(_collective_points(measured.rows, device.link_bandwidth), base.scale_up),
    }
    return Calibration(
        name=f"{measured.name}: {measured.environment.device}, measured {measured.environment.date}",
        estimate=False,
        efficiency=base.model_copy(update=updates),
        environment=measured.environment,
    )


def fit_curve(points: Iterable[Point], default: Curve) -> Curve:
    """Least squares over (x, share); the default where fewer than two sizes were measured."""
    known = [(x, share) for x, share in points if x > 0 and share > 0]
    if len({x for x, _ in known}) < 2:
        return default
    x, share = np.array(known).T
    # Errors count relative to the share: a size that is half as fast matters as much as one twice as fast.
    design = np.stack([share, share / x], axis=1)
    (inverse, slope), *_ = np.linalg.lstsq(design, np.ones_like(share), rcond=None)
    if inverse <= 0 or slope <= 0:
        return Curve(ceiling=float(np.exp(np.log(share).mean())), half=0.0)
    return Curve(ceiling=float(1 / inverse), half=float(slope / inverse))


def _points(
    rows: Iterable[Row], operation: str, phase: str, peak: float, size: Callable[[Row], float]
) -> list[Point]:
    return [
        (size(row), row.flops / row.seconds / peak)
        for row in rows
        if row.operation == operation and row.phase == phase
    ]


def _keys(row: Row) -> float:
    return row.sizes["tokens"]


def _products(rows: tuple[Row, ...], peak: float, base: Efficiency) -> tuple[Curve, Curve]:
    """Size and inner curves of matrix products; the size curve alone has the share of the peak."""
    gemms = [row for row in rows if row.operation == "gemm"]
    shares = [
        (min(row.sizes["rows"], row.sizes["columns"]), row.sizes["inner"], row.flops / row.seconds / peak)
        for row in gemms
    ]
    size, inner = base.gemm, base.gemm_inner
    if len({k for _, k, _ in shares}) < 2:
        return fit_curve([(x, share / reached(inner, k)) for x, k, share in shares], size), inner
    for _ in range(ROUNDS):
        size = fit_curve([(x, share / reached(inner, k)) for x, k, share in shares], base.gemm)
        inner = _fit_half([(k, share / reached(size, x)) for x, k, share in shares])
    return size, inner


def _fit_half(points: Iterable[Point]) -> Curve:
    """A curve of ceiling 1: least squares of share (1 + half / x) = 1."""
    x, share = np.array(list(points), dtype=float).T
    slope = share / x
    return Curve(ceiling=1.0, half=max(0.0, float((slope * (1 - share)).sum() / (slope**2).sum())))


def _grouped_points(rows: Iterable[Row], peak: float, inner: Curve) -> list[Point]:
    return [
        (
            row.sizes["rows"],
            row.flops
            / row.seconds
            / peak
            / float(reached(inner, narrowest(row.sizes["inner"], row.sizes["columns"]))),
        )
        for row in rows
        if row.operation == "grouped_gemm" and row.phase == "forward"
    ]


def _fp8(rows: tuple[Row, ...], device: Device, base: Efficiency, inner: Curve) -> dict[str, Any]:
    """Of a linear's three products two are backward's; casts count in the bytes that the catalogue has."""
    if device.peak.fp8 is None:
        return {}
    points: list[Point] = []
    for row in (row for row in rows if row.operation == "fp8_gemm"):
        share = row.flops / row.seconds / device.peak.fp8
        point = (
            min(row.sizes["rows"], row.sizes["columns"]),
            share / float(reached(inner, row.sizes["inner"])),
        )
        points += [point] * (2 if row.phase == "backward" else 1)
    casts = [row.bytes / row.seconds / device.memory_bandwidth for row in rows if row.operation == "fp8_cast"]
    return {
        "fp8_gemm": fit_curve(points, base.fp8_gemm),
        "fp8_cast": float(np.median(casts)) if casts else base.fp8_cast,
    }


def _delta_curves(rows: tuple[Row, ...], peak: float, base: Efficiency) -> dict[str, Curve]:
    curves = {}
    for bounded, name in ((1, "bounded"), (0, "unbounded")):
        own = [row for row in rows if row.operation == "delta_rule" and row.sizes["bounded"] == bounded]
        for phase in ("forward", "backward"):
            field = f"delta_{name}_{phase}"
            points = _points(own, "delta_rule", phase, peak, lambda r: r.sizes["tokens"] * r.sizes["heads"])
            curves[field] = fit_curve(points, getattr(base, field))
    return curves


def _memory(measured: Measurements, device: Device, base: Efficiency) -> dict[str, Any]:
    copies = [row for row in measured.rows if row.operation == "copy"]
    large = [row.bytes / row.seconds for row in copies if row.bytes >= 2 * LARGE_BYTES]
    moved = [
        row.bytes / row.seconds
        for row in measured.rows
        if row.operation in ("host_to_device", "device_to_host") and row.bytes >= LARGE_BYTES
    ]
    launches = [row.seconds for row in measured.rows if row.operation == "launch"]
    memory = float(np.median(large)) / device.memory_bandwidth if large else base.memory
    steps = [row for row in measured.rows if row.operation == "training_step"]
    return {
        "memory": memory,
        "eager_elementwise": (
            sum(row.seconds for row in steps)
            * (device.memory_bandwidth * memory / sum(row.bytes for row in steps))
            if steps
            else base.eager_elementwise
        ),
        # The slower way: offloaded state goes both ways at once.
        "host_copy": min(moved) / device.host_bandwidth if moved else base.host_copy,
        "host_seconds": max(launches) * HOST_WORK if launches else base.host_seconds,
        "library_bytes": (
            max(0, measured.context_bytes - device.context_bytes)
            if measured.context_bytes
            else base.library_bytes
        ),
    }


def _collective_points(rows: Iterable[Row], link_bandwidth: float) -> list[Point]:
    """Bytes that one rank sends in a ring, and the share of its link that they reach."""
    points = []
    for row in rows:
        if row.operation in ("all_gather", "reduce_scatter"):
            members = row.sizes["group"]
            sent = row.bytes * (members - 1) / members
            points.append((sent, sent / row.seconds / link_bandwidth))
    return points
