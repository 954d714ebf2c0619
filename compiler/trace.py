"""The predicted step of each stage as a trace that Chrome's tracing and Perfetto open.

Trace Event Format, JSON object form: complete events (`X`) in microseconds, one process per pipeline rank
of a stage; stages follow one another.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from shipway.compiler.schedule import Slot
from shipway.compiler.step_time import EXPOSED
from shipway.compiler.timeline import Timeline, timelines
from shipway.schemas.calibration import Calibration
from shipway.schemas.plan import Plan, StagePlan

Event = dict[str, Any]

TRACKS = ("compute", "collectives inside passes", "pipeline sends", "data-parallel collectives")
COMPUTE, INSIDE, SENDS, DATA = range(len(TRACKS))
RANKS_APART = 10_000
"""Process ids between two stages."""
WORDS = {"F": "forward", "B": "backward", "I": "input gradients", "W": "weight gradients"}


def trace_json(plan: Plan, calibration: Calibration | None = None) -> str:
    """Text of the trace of all stages of a plan."""
    events: list[Event] = []
    start = 0.0
    made = timelines(plan, calibration)
    for index, (stage, timeline) in enumerate(zip(plan.stages, made, strict=True)):
        events += stage_events(stage, timeline, index, start)
        start += timeline.step_seconds
    other = {
        "plan": plan.hash,
        "calibration": plan.calibration,
        "stretch": {
            stage.name: round(timeline.stretch, 6) for stage, timeline in zip(plan.stages, made, strict=True)
        },
        "note": "one predicted optimizer step of each stage; passes are stretched from the simulated schedule"
        " to the plan's figure; collectives are summed over the layers of a pass and drawn at its end",
    }
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms", "otherData": other}, indent=0) + "\n"


def stage_events(stage: StagePlan, timeline: Timeline, index: int, start: float) -> Iterator[Event]:
    """Events of one stage's step, which begins `start` seconds into the trace."""
    ranks, chunks = stage.layout.pipeline_parallel, len(stage.layout.stage_layers)
    for rank in range(ranks):
        yield from _names(stage, index, rank)
    for slot in timeline.slots:
        yield from _slot(slot, stage, timeline, index * RANKS_APART + slot.rank, start, chunks)
    for rank in range(ranks):
        at = start + timeline.passes_seconds
        for name, seconds in timeline.after:
            track, words = (DATA, _ledger(stage)) if name == EXPOSED else (COMPUTE, {})
            yield _event(name, "step", index * RANKS_APART + rank, track, at, seconds, words)
            at += seconds


def _names(stage: StagePlan, index: int, rank: int) -> Iterator[Event]:
    process = index * RANKS_APART + rank
    name = f"stage {stage.name}, pipeline rank {rank}"
    yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
    for track, words in enumerate(TRACKS):
        yield {"ph": "M", "name": "thread_name", "pid": process, "tid": track, "args": {"name": words}}


def _slot(
    slot: Slot, stage: StagePlan, timeline: Timeline, process: int, start: float, chunks: int
) -> Iterator[Event]:
    action = slot.action
    first, last = stage.layout.stage_layers[action.chunk]
    words = {"micro-batch": action.micro_batch, "chunk": action.chunk, "layers": f"{first} to {last - 1}"}
    name = f"{WORDS[action.kind]} {action.micro_batch}"
    seconds = slot.end_seconds - slot.start_seconds
    yield _event(name, WORDS[action.kind], process, COMPUTE, start + slot.start_seconds, seconds, words)
    at = start + slot.end_seconds
    inside = timeline.collectives.get(f"{action.kind}{action.chunk}", ())
    begin = at - sum(time for _, time in inside)
    for axis, time in inside:
        yield _event(axis, "collective", process, INSIDE, begin, time, {"micro-batch": action.micro_batch})
        begin += time
    neighbour = action.chunk + (1 if action.kind == "F" else -1)
    sends = action.kind != "W" and 0 <= neighbour < chunks
    if sends and timeline.send_seconds > 0 and stage.layout.rank_of(neighbour) != slot.rank:
        words = {"micro-batch": action.micro_batch, "to chunk": neighbour}
        yield _event("send", "collective", process, SENDS, at, timeline.send_seconds, words)


def _ledger(stage: StagePlan) -> dict[str, Any]:
    """The data-parallel lines of the ledger: what is exposed of them is the event, the rest is hidden."""
    axes = ("dp_shard", "dp_replicate", "expert_shard")
    return {
        f"{line.name} over {line.axis} ({line.group_size})": f"{line.count} x {line.bytes} B,"
        f" {line.seconds:.6f} s, {line.exposed_seconds:.6f} s exposed"
        for line in stage.communication
        if line.axis in axes
    }


def _event(
    name: str, category: str, process: int, track: int, start: float, seconds: float, words: dict[str, Any]
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "cat": category,
        "pid": process,
        "tid": track,
        "ts": round(start * 1e6, 3),
        "dur": round(seconds * 1e6, 3),
        "args": words,
    }
