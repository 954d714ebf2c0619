"""The parity table: a part of it is proven here, and a difference would be seen."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shipway.runtime.parity.__main__ import main
from shipway.runtime.parity.judge import Models, judge
from shipway.runtime.parity.ranks import Trace
from shipway.runtime.parity.report import keep
from shipway.runtime.parity.table import ROWS
from shipway.runtime.parity.verdict import LATER, TOLERANCES, Verdict, compare
from shipway.schemas.capability import CAPABILITY

CORE = ("fsdp 2, ep 2", "tp 2, ep 2", "cp 2", "fsdp 2, selective recomputation")
TOLERANCE = TOLERANCES["cpu", "fp32"]


def test_quick_core_of_the_table_is_proven(tmp_path: Path) -> None:
    verdicts = judge({name: ROWS[name] for name in CORE}, Models(tmp_path), "cpu")
    off = {v.name: v.reason or v.differences for v in verdicts if not v.proven(TOLERANCE)}
    assert not off
    assert all({"router", "experts", "loss", "norm", "loads"} <= v.differences.keys() for v in verdicts)


def test_every_axis_that_is_called_proven_is_in_the_table() -> None:
    for axis in CAPABILITY.axes:
        if axis.proven:
            degrees = [getattr(row.layout, axis.field) for row in ROWS.values()]
            assert max(degrees) > 1, axis.name


@pytest.mark.parametrize("field", ["schedule", "recompute", "zero", "offload"])
def test_whatever_the_planner_offers_is_in_the_table(field: str) -> None:
    offered = {
        "schedule": CAPABILITY.schedules,
        "recompute": CAPABILITY.recompute,
        "offload": CAPABILITY.offload,
        "zero": CAPABILITY.zero + CAPABILITY.zero_with_pipeline,
    }
    assert {getattr(row.layout, field) for row in ROWS.values()} >= set(offered[field])


def test_schedules_that_fp8_does_not_run_are_neither_proven_nor_off(tmp_path: Path) -> None:
    (verdict,) = judge({"pp 2, zbv": ROWS["pp 2, zbv"]}, Models(tmp_path, dtype="fp8"), "cpu", "fp8")
    assert verdict.refused
    assert "schedule zbv" in verdict.reason


TRACE = Trace([2.0, 1.5], [3.0, 2.5], {"1": [3, 1]}, {"layers.1.feed_forward.experts.gate": torch.ones(4)})


@pytest.mark.parametrize(
    ("changed", "column"),
    [
        (replace(TRACE, losses=[2.001, 1.5]), "loss"),
        (replace(TRACE, norms=[3.003, 2.5]), "norm"),
        (replace(TRACE, norms=[3.0, 2.6]), LATER),
        (replace(TRACE, loads={"1": [2, 2]}), "loads"),
        (replace(TRACE, gradients={n: 2 * g for n, g in TRACE.gradients.items()}), "experts"),
        (replace(TRACE, gradients={}), "experts"),
    ],
)
def test_difference_is_seen_in_its_column(changed: Trace, column: str) -> None:
    differences = compare(TRACE, changed)
    assert not Verdict("x", 1, differences).proven(TOLERANCE)
    assert [name for name, value in differences.items() if value > 1e-4] == [column]


def test_kept_table_holds_the_rows_of_every_run(tmp_path: Path) -> None:
    path = tmp_path / "parity.json"
    keep(path, [Verdict("a", 1, {"loss": 0.0}), Verdict("b", 2, reason="lost")], TOLERANCE, "cpu", "fp32")
    keep(path, [Verdict("b", 2, {"loss": 1.0})], TOLERANCE, "cpu", "fp32")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["layout"], row["proven"]) for row in rows] == [("a", True), ("b", False)]
    assert "| b | 2 | off by 1.0e+00 | 1e+00 |" in path.with_suffix(".md").read_text()


def test_unknown_layout_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--only", "tp 3"])
    assert "tp 2, ep 2" in capsys.readouterr().err
