"""What `shipway watch` shows of a run, read from the run's folder alone: the run is never disturbed.

One snapshot is plain data; it is the same that `--json` prints and that the live view draws.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shipway.compiler.launch.record import (
    CHECKPOINT_MARKER,
    newest_checkpoint,
    read_attempts,
    run_status,
)

TAIL_BYTES = 4 * 2**20
"""Of metrics.jsonl: enough for a few hundred steps and the last details, whatever the file's size."""
CURVE_STEPS = 60
RECENT_STEPS = 20
STALLED_FACTOR = 10.0
STALLED_SECONDS = 60.0
"""A running job whose last step is this long ago, and STALLED_FACTOR steps' time, is said to stand still."""

Line = Mapping[str, Any]


def snapshot(folder: Path, now: float | None = None) -> dict[str, Any]:
    """Where the run in `folder` stands; what it has no figures of is None, or left out before the first step.

    `now` is in seconds of the epoch.
    """
    now = time.time() if now is None else now
    lines = tail(folder / "metrics.jsonl")
    steps = [line for line in lines if "event" not in line and "step_seconds" in line]
    details = (tail(folder / "details.jsonl") or [{}])[-1]
    status, attempts = run_status(folder), read_attempts(folder)
    found: dict[str, Any] = {
        "run": folder.name,
        "state": str(status.get("state", "not started")),
        "reason": str(status.get("reason", "")),
        "attempts": len(attempts),
        "last_attempt": attempts[-1].reason if attempts else None,
        "checkpoint": _checkpoint(folder, now),
        "evaluation": _last(lines, "evaluation", "measures"),
        "slow_ranks": details.get("slow_ranks") or [],
        "utilisation": details.get("utilisation"),
        "communication": _communication(lines),
        "progress": None,
    }
    if steps:
        found |= _progress(steps, found["state"], now - (folder / "metrics.jsonl").stat().st_mtime)
    return found


def strict(value: Any) -> Any:
    """The same data for JSON, which has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def tail(path: Path, size: int = TAIL_BYTES) -> list[dict[str, Any]]:
    """The last whole lines of a file of JSON objects; none when there is no file."""
    try:
        with path.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(max(0, length - size))
            text = file.read()
    except FileNotFoundError:
        return []
    lines = text.split(b"\n")[1 if length > size else 0 :]
    found = []
    for line in lines:
        try:
            value = json.loads(line)
        except ValueError:
            continue  # empty, or being written
        if isinstance(value, dict):
            found.append(value)
    return found


def _progress(steps: Sequence[Line], state: str, quiet_seconds: float) -> dict[str, Any]:
    last, recent = steps[-1], [s for s in steps[-RECENT_STEPS:] if s["stage"] == steps[-1]["stage"]]
    seconds = statistics.median(s["step_seconds"] for s in recent)
    waited = sum(s["data_wait_seconds"] for s in recent) / max(1e-9, sum(s["step_seconds"] for s in recent))
    loads = last["expert_load"]
    worst = max(loads, key=lambda name: loads[name]) if loads else None
    return {
        "progress": {
            "stage": last["stage"],
            "stage_step": last["stage_step"],
            "stage_steps": last["stage_steps"],
            "step": last["step"],
            "tokens": last["tokens"],
            "stage_seconds_left": (last["stage_steps"] - last["stage_step"]) * seconds,
            "seconds_since_last_step": max(0.0, quiet_seconds),
            "stalled": state == "running" and quiet_seconds > max(STALLED_SECONDS, STALLED_FACTOR * seconds),
        },
        "loss": {
            "last": last["loss"],
            "mean_of_recent": statistics.fmean(s["loss"] for s in recent),
            "curve": [s["loss"] for s in steps[-CURVE_STEPS:]],
        },
        "gradient_norm": last["gradient_norm"],
        "learning_rate": last["learning_rate"],
        "not_finite": sum(not s["finite"] for s in recent),
        "step_seconds": _beside(seconds, last["planned_step_seconds"]),
        "tokens_per_second": _beside(
            statistics.median(s["tokens_per_second"] for s in recent), last["planned_tokens_per_second"]
        ),
        "mfu": _beside(statistics.median(s["mfu"] for s in recent), last["planned_mfu"]),
        "memory_allocated_bytes": _beside(
            last["memory_allocated_bytes"], last["planned_memory_allocated_bytes"]
        ),
        "memory_reserved_bytes": _beside(
            last["memory_reserved_bytes"], last["planned_memory_reserved_bytes"]
        ),
        "data_wait_share": waited,
        "expert_load": {
            "worst_layer": worst,
            "worst": loads[worst] if worst is not None else None,
            "mean": statistics.fmean(loads.values()) if loads else None,
        },
    }


def _beside(measured: float | None, planned: float) -> dict[str, float | None]:
    known = measured is not None and planned > 0 and math.isfinite(measured)
    return {
        "measured": measured,
        "planned": planned,
        "ratio": measured / planned if known and measured is not None else None,
    }


def _checkpoint(folder: Path, now: float) -> dict[str, Any] | None:
    newest = newest_checkpoint(folder)
    if newest is None:
        return None
    age = now - (newest / CHECKPOINT_MARKER).stat().st_mtime
    return {"path": str(newest), "step": int(newest.name.removeprefix("step-")), "age_seconds": max(0.0, age)}


def _last(lines: Sequence[Line], event: str, key: str) -> Any:
    return next((line[key] for line in reversed(lines) if line.get("event") == event), None)


def _communication(lines: Sequence[Line]) -> dict[str, Any] | None:
    """Of the last profile: seconds a step by axis, beside the plan's."""
    measured = _last(lines, "profile", "communication_seconds_per_step")
    if measured is None:
        return None
    planned = _last(lines, "profile", "planned_communication_seconds_per_step")
    return {"measured_seconds_per_step": measured, "planned_seconds_per_step": planned}
