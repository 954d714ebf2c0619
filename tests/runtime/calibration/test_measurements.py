"""Calibration measures real operations and writes rows that the schema reads back."""

from pathlib import Path

import torch

from shipway.runtime.calibration import main, operations
from shipway.runtime.calibration.timing import time_operation
from shipway.schemas.measurement import Measurements


def test_a_quick_calibration_measures_every_single_device_operation(tmp_path: Path) -> None:
    out = tmp_path / "calibration.json"
    assert main.main(["--out", str(out), "--quick", "--name", "here"]) == 0
    measured = Measurements.model_validate_json(out.read_text())
    found = {(row.operation, row.phase) for row in measured.rows}
    for operation in ("grouped_gemm", "attention", "delta_rule"):
        assert {(operation, "forward"), (operation, "backward")} <= found
    assert {"gemm", "copy", "elementwise", "launch"} <= {row.operation for row in measured.rows}
    assert all(row.seconds > 0 for row in measured.rows)
    assert measured.name == "here"


def test_flops_of_a_gemm_row_are_those_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    rows, inner, columns = operations.QUICK.gemms[0]
    with FlopCounterMode(display=False) as counter:
        torch.randn(rows, inner) @ torch.randn(inner, columns)
    measured = next(iter(operations.FAMILIES["gemm"](torch.device("cpu"), operations.QUICK, torch.float32)))
    assert measured.flops == counter.get_total_flops()


def test_the_preparation_before_each_repeat_is_run_every_time() -> None:
    calls: list[str] = []
    time_operation(
        lambda: calls.append("run"),
        torch.device("cpu"),
        warmup=1,
        repeats=3,
        prepare=lambda: calls.append("prepare"),
    )
    assert calls == ["prepare", "run"] * 4
