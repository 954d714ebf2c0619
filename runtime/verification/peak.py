"""What holds a device's memory at its peak: live allocations by the line of code that made them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

ENTRIES = 400_000
"""Allocations and frees that are remembered; one step of a large model makes tens of thousands."""
MOST = 20
"""Lines that are told."""
BEFORE = "held since before the step"
_UNSAID = ("/torch/autograd/", "/torch/_ops.py", "/torch/nn/modules/module.py", "/torch/_tensor.py")


def record(device: torch.device) -> None:
    """Begin to remember allocations; of CUDA devices only."""
    if device.type == "cuda":
        torch.cuda.memory._record_memory_history(max_entries=ENTRIES, stacks="python")


def holders(device: torch.device) -> dict[str, int]:
    """Bytes by line at the peak since `record`, largest first; stops remembering."""
    if device.type != "cuda":
        return {}
    history = torch.cuda.memory._snapshot()["device_traces"][device.index or 0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return at_peak(history)


def at_peak(history: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Walk allocations and frees in order, and sum what lives when most does, by line of code.

    BEFORE counts what is freed without having been allocated here, up to where it is freed.
    """
    live: dict[int, tuple[int, str]] = {}
    total, most, peak = 0, 0, 0
    events = list(history)
    for index, event in enumerate(events):
        total += _change(event, live)
        if total > most:
            most, peak = total, index
    live.clear()
    for event in events[: peak + 1]:
        _change(event, live)
    lines: dict[str, int] = {}
    for size, line in live.values():
        lines[line] = lines.get(line, 0) + size
    freed_later = _freed_later(events[peak + 1 :], set(live))
    if freed_later:
        lines[BEFORE] = freed_later
    return dict(sorted(lines.items(), key=lambda item: -item[1])[:MOST])


def _change(event: Mapping[str, Any], live: dict[int, tuple[int, str]]) -> int:
    """Bytes by which an event changes what is alive."""
    if event["action"] == "alloc":
        live[event["addr"]] = (event["size"], _line(event.get("frames", ())))
        return int(event["size"])
    if event["action"] == "free_completed":
        known = live.pop(event["addr"], None)
        return -(known[0] if known else int(event["size"]))
    return 0


def _freed_later(events: Iterable[Mapping[str, Any]], live: set[int]) -> int:
    """Bytes freed after the peak that were allocated before the walk began."""
    size, made = 0, set(live)
    for event in events:
        if event["action"] == "alloc":
            made.add(event["addr"])
        elif event["action"] == "free_completed":
            size += 0 if event["addr"] in made else int(event["size"])
            made.discard(event["addr"])
    return size


def _line(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of Python that says something."""
    for frame in frames:
        name = str(frame["filename"])
        if name.endswith(".py") and not any(part in name for part in _UNSAID):
            return f"{'/'.join(name.split('/')[-2:])}:{frame['line']} {frame['name']}"
    return "backward"
