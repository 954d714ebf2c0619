"""Pictures of results: whole, deterministic, and only of what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from bench.plot import RESULTS, by_case, latest, pictures

ROW = {
    "name": "dense_8k/shipway/master",
    "case": "dense_8k",
    "kind": "shipway",
    "states": "master",
    "variant": "",
    "outcome": "measured",
    "tokens_per_second": 40_000.0,
    "allocated_bytes": 2**36,
    "mfu": 0.4,
}


def test_every_picture_of_the_kept_results_is_xml_and_the_same_each_time() -> None:
    drawn = pictures(RESULTS)
    assert {"planned-allocated.svg", "planned-step.svg", "cost-by-context.svg"} <= set(drawn)
    assert drawn == pictures(RESULTS)
    for text in drawn.values():
        ElementTree.fromstring(text)


def test_nothing_is_drawn_without_results(tmp_path: Path) -> None:
    assert pictures(tmp_path) == {}


def test_bars_are_of_the_last_row_of_each_contender_that_was_measured(tmp_path: Path) -> None:
    again = ROW | {"tokens_per_second": 50_000.0}
    failed = {"name": ROW["name"], "case": "dense_8k", "kind": "shipway", "outcome": "timeout", "detail": ""}
    (tmp_path / "h200-throughput.json").write_text(json.dumps({"rows": [ROW, again, failed]}))
    assert latest([ROW, again, failed]) == [again]
    ((bar,),) = by_case([again]).values()
    assert bar.value == pytest.approx(50_000)
    assert "50,000, 64.0 GiB, MFU 40%" in pictures(tmp_path)["throughput.svg"]
