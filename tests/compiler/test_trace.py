"""The trace of a plan: complete, in the schedule's order, as long as the plan says."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from shipway.compiler.cli.app import run
from shipway.compiler.pipeline import make_plan
from shipway.compiler.schedule import orders_of
from shipway.compiler.trace import COMPUTE, RANKS_APART, WORDS, trace_json
from shipway.schemas.plan import Plan
from tests.compiler.blueprint_files import WHOLE, write
from tests.compiler.planner.planning import blueprint

PINS = {
    "one rank": ("tiny",),
    "pipeline": (
        "llama31_8b",
        "training.layout={pipeline_parallel: 4, tensor_parallel: 2, schedule: 1f1b}",
        "cluster=h100_8x8",
    ),
    "interleaved": (
        "llama31_8b",
        "training.layout={pipeline_parallel: 2, virtual_stages: 2, schedule: interleaved_1f1b}",
        "cluster=h100_8x8",
    ),
    "V-shaped": (
        "llama31_8b",
        "training.layout={pipeline_parallel: 4, schedule: zbv}",
        "cluster=h100_8x8",
    ),
}


@cache
def planned(case: str) -> Plan:
    made = make_plan(blueprint(*PINS[case]))
    assert isinstance(made, Plan), made
    return made


@cache
def events(case: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace_json(planned(case)))["traceEvents"]
    return found


def spans(case: str, stage: int) -> list[dict[str, Any]]:
    return [e for e in events(case) if e["ph"] == "X" and e["pid"] // RANKS_APART == stage]


@pytest.mark.parametrize("case", PINS)
def test_a_stage_takes_as_long_as_the_plan_says(case: str) -> None:
    for index, stage in enumerate(planned(case).stages):
        begin = min(e["ts"] for e in spans(case, index))
        end = max(e["ts"] + e["dur"] for e in spans(case, index))
        assert end - begin == pytest.approx(stage.step_seconds * 1e6, rel=1e-6, abs=0.01)


@pytest.mark.parametrize("case", PINS)
def test_passes_are_in_the_order_of_the_schedule(case: str) -> None:
    for index, stage in enumerate(planned(case).stages):
        layout = stage.layout
        for rank in range(layout.pipeline_parallel):
            mine = [e for e in spans(case, index) if e["pid"] % RANKS_APART == rank]
            passes = [e for e in mine if e["tid"] == COMPUTE and e["cat"] in WORDS.values()]
            order = orders_of(layout)[rank]
            passes.sort(key=lambda e: (e["ts"], e["dur"]))
            assert [(e["cat"], e["args"]["chunk"], e["args"]["micro-batch"]) for e in passes] == [
                (WORDS[action.kind], action.chunk, action.micro_batch) for action in order
            ]


@pytest.mark.parametrize("case", PINS)
def test_nothing_overlaps_on_a_track_of_compute(case: str) -> None:
    tracks: dict[int, list[tuple[float, float]]] = defaultdict(list)
    for event in events(case):
        if event["ph"] == "X" and event["tid"] == COMPUTE:
            tracks[event["pid"]].append((event["ts"], event["ts"] + event["dur"]))
    for track in tracks.values():
        track.sort()
        assert all(first[1] <= second[0] + 0.01 for first, second in itertools.pairwise(track))


def test_collectives_lie_inside_their_passes() -> None:
    found = [e for e in spans("pipeline", 0) if e["name"] == "tensor-parallel collectives"]
    passes = [e for e in spans("pipeline", 0) if e["cat"] in WORDS.values()]
    assert len(found) == len(passes)
    found.sort(key=lambda e: (e["pid"], e["ts"] + e["dur"]))
    passes.sort(key=lambda e: (e["pid"], e["ts"] + e["dur"]))
    for inner, outer in zip(found, passes, strict=True):
        assert inner["ts"] >= outer["ts"]
        assert inner["ts"] + inner["dur"] == pytest.approx(outer["ts"] + outer["dur"], abs=0.01)


def test_command_writes_the_trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, WHOLE)
    assert run(["plan", "mine.yaml", "--quiet", "--trace", "step.json"]) == 0
    assert json.loads((tmp_path / "step.json").read_text())["traceEvents"]
