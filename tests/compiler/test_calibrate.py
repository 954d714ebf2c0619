"""Fitted curves are those that the measured rows lie on; what was not measured keeps its default."""

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shipway.compiler.calibrate import calibrate, fit_curve
from shipway.compiler.documents import read_document
from shipway.compiler.efficiency import default_calibration
from shipway.compiler.groups import our_folder
from shipway.compiler.timing import Fp8, machine, reached
from shipway.schemas.calibration import Curve
from shipway.schemas.cluster import Device
from shipway.schemas.measurement import Environment, Measurements, Row

H200 = Device.from_data(read_document(our_folder() / "device" / "h200.yaml").data)
SIZES = (64.0, 256.0, 1024.0, 8192.0)


def measurements(*rows: Row) -> Measurements:
    environment = Environment(
        device="NVIDIA H200", devices=1, torch="2.13.0", date="2026-01-02", command="calibrate"
    )
    return Measurements(name="mine", environment=environment, memory_bytes=0, context_bytes=0, rows=rows)


@given(st.floats(0.05, 1.0), st.floats(1.0, 5000.0))
def test_a_curve_is_recovered_from_points_on_it(ceiling: float, half: float) -> None:
    curve = Curve(ceiling=ceiling, half=half)
    found = fit_curve([(x, float(reached(curve, x))) for x in SIZES], Curve(ceiling=1, half=0))
    assert found.ceiling == pytest.approx(ceiling, rel=1e-6)
    assert found.half == pytest.approx(half, rel=1e-6)


def test_one_size_is_no_curve() -> None:
    default = Curve(ceiling=0.5, half=7)
    assert fit_curve([(64.0, 0.3), (64.0, 0.4)], default) == default


def test_shares_that_fall_with_size_give_a_constant() -> None:
    found = fit_curve([(64.0, 0.8), (1024.0, 0.2)], Curve(ceiling=1, half=0))
    assert found.half == 0
    assert found.ceiling == pytest.approx(0.4)


def test_without_rows_every_figure_keeps_its_default() -> None:
    assert calibrate(measurements(), H200).efficiency == default_calibration(H200).efficiency


def test_a_plan_by_measured_products_takes_the_measured_time() -> None:
    default, curve = default_calibration(H200).efficiency, Curve(ceiling=0.5, half=300)
    rows = []
    for size in (512, 1024, 4096, 16384):
        flops = 2.0 * size * 4096 * 16384
        share = float(reached(curve, size)) * float(reached(default.gemm_inner, 4096))
        seconds = flops / (H200.peak.bf16 * share)
        sizes = {"rows": size, "inner": 4096, "columns": 16384}
        rows.append(Row(operation="gemm", sizes=sizes, flops=flops, seconds=seconds))
    found = calibrate(measurements(*rows), H200)
    assert found.name == "mine: NVIDIA H200, measured 2026-01-02"
    assert not found.estimate
    rates = machine(H200, found, "bf16")
    for row in rows:
        planned = float(rates.gemm_seconds(row.sizes["rows"], 4096, 16384, 1, False))
        assert planned == pytest.approx(row.seconds + rates.efficiency.kernel_seconds, rel=1e-3)


def test_the_slower_way_to_the_host_tells_what_offload_moves_at() -> None:
    rows = [
        Row(
            operation=way,
            sizes={"bytes": 2**30},
            bytes=2.0**30,
            seconds=2**30 / (share * H200.host_bandwidth),
        )
        for way, share in (("host_to_device", 0.9), ("device_to_host", 0.7))
    ]
    assert calibrate(measurements(*rows), H200).efficiency.host_copy == pytest.approx(0.7)


def test_large_copies_tell_the_memory_bandwidth() -> None:
    row = Row(
        operation="copy", sizes={"bytes": 2**30}, bytes=2.0**31, seconds=2**31 / (0.8 * H200.memory_bandwidth)
    )
    assert calibrate(measurements(row), H200).efficiency.memory == pytest.approx(0.8)


def test_gathers_tell_the_links_curve_by_what_one_rank_sends() -> None:
    curve, members = Curve(ceiling=0.7, half=1e6), 4
    rows = []
    for size in (2**20, 2**24, 2**28):
        sent = size * (members - 1) / members
        seconds = sent / (H200.link_bandwidth * float(reached(curve, sent)))
        sizes = {"group": members, "bytes": size}
        rows.append(Row(operation="all_gather", sizes=sizes, bytes=float(size), seconds=seconds))
    found = calibrate(measurements(*rows), H200).efficiency.scale_up
    assert found.ceiling == pytest.approx(0.7, rel=1e-3)
    assert found.half == pytest.approx(1e6, rel=1e-2)


def test_products_and_casts_in_fp8_take_the_measured_time() -> None:
    curve, inner = Curve(ceiling=0.45, half=250), default_calibration(H200).efficiency.gemm_inner
    rows = []
    for size, phase in product((1024, 4096, 16384), ("forward", "backward")):
        flops, sizes = 2.0 * size * 4096 * 32768, {"rows": size, "inner": 4096, "columns": 32768}
        share = float(reached(curve, size)) * float(reached(inner, 4096))
        seconds = flops / (H200.peak.fp8 * share)
        rows.append(Row(operation="fp8_gemm", phase=phase, sizes=sizes, flops=flops, seconds=seconds))
    moved = 3.0 * 8192 * 4096
    seconds = moved / (0.7 * H200.memory_bandwidth)
    sizes = {"rows": 8192, "width": 4096, "across": 0}
    rows.append(Row(operation="fp8_cast", sizes=sizes, bytes=moved, seconds=seconds))
    found = calibrate(measurements(*rows), H200)
    assert found.efficiency.fp8_cast == pytest.approx(0.7)
    rates = machine(H200, found, "bf16", Fp8(H200.peak.fp8, 2048, casts_fused=True))
    row = rows[2]
    expected = row.seconds + found.efficiency.kernel_seconds
    assert rates.fp8_gemm_seconds(4096, 4096, 32768) == pytest.approx(expected, rel=1e-3)
