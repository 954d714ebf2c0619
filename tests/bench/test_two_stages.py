"""The bench of two stages: what it would call missing or different (it runs on GPUs; here its judgement)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.two_stages import PREEMPTED, differences, missing, prepare
from shipway.runtime.build_folder import read_plan

SHOWN: dict[str, Any] = {
    "profiles": 2,
    "traces": [2, 2],
    "communication_seconds_per_step": [{"ep": 0.1, "fsdp": 0.1}, {"cp": 0.2}],
    "memory_snapshots": [7, 7],
    "utilisation": [{"least": 0.4, "median": 0.5}],
    "memory_allocated_bytes": [1],
    "mfu": [0.1, 0.2],
    "expert_hits_of_layers": 3,
    "prometheus_figures": {"short": 20, "long": 30},
}


def test_all_that_is_promised_on_gpus_is_enough() -> None:
    assert list(missing(SHOWN, "cuda", 2)) == []


@pytest.mark.parametrize(
    "changed",
    [
        {"profiles": 1},
        {"traces": []},
        {"communication_seconds_per_step": [{"unnamed": 0.1}, {"cp": 0.2}]},
        {"memory_snapshots": [7]},
        {"utilisation": []},
        {"memory_allocated_bytes": [None]},
        {"prometheus_figures": {"short": 20, "long": 0}},
    ],
)
def test_what_is_missing_is_named(changed: dict[str, Any]) -> None:
    assert list(missing(SHOWN | changed, "cuda", 2))


def _run(folder: Path, steps: list[tuple[int, float, str]]) -> Path:
    folder.mkdir()
    lines = [{"step": step, "loss": loss, "stream_hash": token_hash} for step, loss, token_hash in steps]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_lost_steps_other_tokens_and_other_losses_are_named(tmp_path: Path) -> None:
    whole = _run(tmp_path / "whole", [(1, 2.0, "a"), (2, 1.9, "b"), (3, 1.8, "c")])
    assert list(differences(whole, whole, PREEMPTED, 0.0)) == []
    assert list(differences(whole, whole, 76, 0.0)) == ["asked to stop it left with 76, not 75"]
    other = _run(tmp_path / "other", [(1, 2.0, "a"), (3, 1.9, "x")])
    assert list(differences(other, whole, PREEMPTED, 0.1)) == [
        "a step is missing or double",
        "other tokens were trained on",
    ]
    worse = _run(tmp_path / "worse", [(1, 2.0, "a"), (2, 2.0, "b"), (3, 1.8, "c")])
    assert list(differences(worse, whole, PREEMPTED, 0.01)) == ["a loss differs by 5.26%"]


def test_layout_changes_between_its_stages(tmp_path: Path) -> None:
    first, second = read_plan(prepare(tmp_path / "build", "cuda", 2)).stages
    assert (first.layout.expert_parallel, first.layout.context_parallel) == (2, 1)
    assert second.layout.context_parallel == 2
    assert second.context_tokens == 2 * first.context_tokens
