"""The parity table: its quick core is proven, and a difference would be seen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shipway.runtime import parity
from shipway.runtime.parity_ranks import Trace
from shipway.schemas.capability import CAPABILITY

CORE = ("fsdp 2, ep 2", "tp 2, ep 2", "fsdp 2, selective recomputation")


def test_quick_core_of_the_table_is_proven(tmp_path: Path) -> None:
    build = parity.build_tiny(tmp_path / "tiny")
    verdicts = parity.judge({name: parity.LAYOUTS[name] for name in CORE}, build, "cpu")
    off = {v.name: v.reason or v.differences for v in verdicts if not v.proven(parity.TOLERANCE["cpu"])}
    assert not off
    assert all({"router", "experts", "loss", "norm", "loads"} <= v.differences.keys() for v in verdicts)


def test_every_axis_that_is_called_proven_is_in_the_table() -> None:
    for axis in CAPABILITY.axes:
        if axis.proven:
            degrees = [getattr(layout, axis.field) for layout in parity.LAYOUTS.values()]
            assert max(degrees) > 1, axis.name


TRACE = Trace([2.0, 1.5], [3.0, 2.5], {"1": [3, 1]}, {"layers.1.feed_forward.experts.gate": torch.ones(4)})


@pytest.mark.parametrize(
    ("changed", "column"),
    [
        (replace(TRACE, losses=[2.001, 1.5]), "loss"),
        (replace(TRACE, norms=[3.003, 2.5]), "norm"),
        (replace(TRACE, norms=[3.0, 2.6]), parity.LATER),
        (replace(TRACE, loads={"1": [2, 2]}), "loads"),
        (replace(TRACE, gradients={n: 2 * g for n, g in TRACE.gradients.items()}), "experts"),
        (replace(TRACE, gradients={}), "experts"),
    ],
)
def test_difference_is_seen_in_its_column(changed: Trace, column: str) -> None:
    differences = parity.compare(TRACE, changed)
    assert not parity.Verdict("x", 1, differences).proven(1e-5)
    assert [name for name, value in differences.items() if value > 1e-4] == [column]


def test_unknown_layout_is_refused_with_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parity.main(["--only", "tp 3"])
    assert "tp 2, ep 2" in capsys.readouterr().err
