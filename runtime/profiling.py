"""A profile of a running job, on demand: traces for Perfetto, memory snapshots, communication by axis.

Asked for by `shipway profile RUN`, which leaves `profile.request` in the run's folder, or by SIGUSR2 to
any rank. All ranks agree at a step's end, profile the next steps, and write into `profiles/step-N/`:

    rank0.trace.json     for ui.perfetto.dev, beside the planned one (`shipway plan --trace`)
    rank0.memory.pickle  on GPUs, when memory is asked for: for pytorch.org/memory_viz
    summary.json         seconds a step of each axis's communication and of the rest, beside the plan's
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shipway.runtime.run_folder import replace_text
from shipway.runtime.signals import StopRequest
from shipway.runtime.stage import StageRun

REQUEST_FILE = "profile.request"
DEFAULT_STEPS = 3
RANKS_WRITTEN = 8
"""Ranks that leave a trace, the first ones: of ten thousand, nobody opens more."""
LOOK_SECONDS = 1.0
MEMORY_BIT = 1 << 20
"""Added to the number of steps where memory is asked for, so that one integer says both."""
MEMORY_ENTRIES = 200_000
DESCRIPTION = "Process Group Description"
"""What a trace calls it."""
UNNAMED = "unnamed"
"""Axis of collectives whose group a trace does not tell: gloo's."""


@dataclass
class ProfileRequests:
    """Whether someone wants a profile; only rank 0 looks for the file."""

    path: Path
    looks: bool
    stop: StopRequest
    _looked: float = 0.0

    def pending(self) -> int:
        """Steps asked for, with MEMORY_BIT; 0 for none. A request is taken once."""
        if self.stop.profile:
            self.stop.profile = False
            return DEFAULT_STEPS
        if not self.looks or time.monotonic() - self._looked < LOOK_SECONDS:
            return 0
        self._looked = time.monotonic()
        try:
            asked = json.loads(self.path.read_text())
            self.path.unlink()
        except (OSError, ValueError):
            return 0
        steps = asked.get("steps", DEFAULT_STEPS) if isinstance(asked, dict) else DEFAULT_STEPS
        steps = min(max(int(steps), 1), 100) if isinstance(steps, int) else DEFAULT_STEPS
        return steps | (MEMORY_BIT if isinstance(asked, dict) and asked.get("memory") else 0)


@dataclass
class Profiler:
    """Profiles the coming steps of a stage when it is told to."""

    run: StageRun
    _left: int = 0
    _folder: Path = field(default_factory=Path)
    _first: int = 0
    _memory: bool = False
    _profile: Any = None

    def start(self, asked: int) -> None:
        """Begin with the next step; nothing while one is under way, or when `asked` is 0."""
        if not asked or self._left:
            return
        self._left, self._memory = asked & (MEMORY_BIT - 1), bool(asked & MEMORY_BIT)
        self._left = min(self._left, self.run.stage.steps - self.run.position.stage_step)
        if not self._left:
            return
        self._first = self.run.position.step + 1
        self._folder = self.run.context.run.path / "profiles" / f"step-{self._first:08d}"
        on_gpu = self.run.context.device.type == "cuda"
        kinds = [torch.profiler.ProfilerActivity.CPU]
        kinds += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
        self._profile = torch.profiler.profile(activities=kinds, profile_memory=self._memory)
        if self._memory and on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_ENTRIES)
        self._profile.__enter__()

    def step_ends(self) -> dict[str, Any] | None:
        """Count a step; after the last one write everything. Rank 0 is given the summary then."""
        if not self._left:
            return None
        self._left -= 1
        if self._left:
            return None
        self._profile.__exit__(None, None, None)
        profile, self._profile = self._profile, None
        rank = dist.get_rank()
        if rank >= RANKS_WRITTEN:
            return None
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"rank{rank}.trace.json"
        profile.export_chrome_trace(str(trace))
        if self._memory and self.run.context.device.type == "cuda":
            torch.cuda.memory._dump_snapshot(str(self._folder / f"rank{rank}.memory.pickle"))
            torch.cuda.memory._record_memory_history(enabled=None)
        return self._summarise(trace) if rank == 0 else None

    def _summarise(self, trace: Path) -> dict[str, Any]:
        steps = self.run.position.step - self._first + 1
        measured = communication_seconds(json.loads(trace.read_text())["traceEvents"])
        planned: dict[str, float] = {}
        for line in self.run.stage.communication:
            planned[line.axis] = planned.get(line.axis, 0.0) + line.seconds
        summary = {
            "first_step": self._first,
            "steps": steps,
            "communication_seconds_per_step": {axis: s / steps for axis, s in measured.items()},
            "planned_communication_seconds_per_step": planned,
            "folder": str(self._folder),
        }
        replace_text(self._folder / "summary.json", json.dumps(summary, indent=1, sort_keys=True) + "\n")
        return summary


def communication_seconds(events: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of collectives by mesh axis in a trace's events (Trace Event Format, microseconds).

    NCCL's kernels, or the calls that launched them, carry their group's description, `mesh_AXIS`; gloo's
    calls carry none.
    """
    events, found = list(events), dict[str, float]()
    of_call = {
        event["args"].get("External id"): event["args"].get(DESCRIPTION)
        for event in events
        if event.get("name") == "record_param_comms" and event.get("args")
    }
    for event in events:
        if event.get("ph") != "X":
            continue
        name, arguments = str(event.get("name", "")), event.get("args") or {}
        if event.get("cat") == "kernel" and name.startswith("nccl"):
            told = arguments.get(DESCRIPTION) or of_call.get(arguments.get("External id"))
            axis = str(told or UNNAMED).removeprefix("mesh_")
        elif name.startswith("gloo:"):
            axis = UNNAMED
        else:
            continue
        found[axis] = found.get(axis, 0.0) + float(event.get("dur", 0.0)) / 1e6
    return found


def describe_profile(summary: Mapping[str, Any]) -> str:
    """One line."""
    seconds = summary["communication_seconds_per_step"]
    axes = ", ".join(f"{axis} {s * 1e3:.1f} ms" for axis, s in sorted(seconds.items())) or "none"
    return (
        f"profile of {summary['steps']} steps from step {summary['first_step']} in {summary['folder']}:"
        f" communication a step: {axes}; open the traces at ui.perfetto.dev"
    )
