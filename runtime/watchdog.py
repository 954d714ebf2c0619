"""Tells a hang from a slow step, says which rank is late, dumps stacks, and ends the process.

A step that takes many times the median is a hang. Ranks leave a note of where they are (step and
phase) in the job's key-value store; when a rank's time is up, it reads all notes and names those that
are furthest behind: a rank that waits in a collective is not the one that is late.
"""

from __future__ import annotations

import faulthandler
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from shipway.runtime.exit_codes import ExitCode

PHASES = ("data", "forward and backward", "gradients", "update", "evaluation", "checkpoint", "preparation")
"""In the order of a step; preparation is what comes before the first one."""
UNMEASURED_FACTOR = 10.0
"""Evaluation and checkpoints have no median to go by: they may take this many times a step's limit."""
POLL_SECONDS = 1.0
NOTE_SECONDS = 5.0
"""Notes are at most this old, so that a large job does not drown its store."""
GRACE_SECONDS = 10.0
"""Other ranks get this long to dump their stacks too, before the first exit ends the job."""


class Notes(Protocol):
    """A key-value store that all ranks see."""

    def set(self, key: str, value: str) -> None:
        """Overwrite a value."""

    def get(self, key: str) -> bytes:
        """Read a value, waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys are there."""


@dataclass(frozen=True)
class Whereabouts:
    """Where a rank was when it last left a note."""

    rank: int
    host: str
    step: int
    phase: str

    @property
    def order(self) -> tuple[int, int]:
        """Sorts the furthest behind first."""
        return (self.step, PHASES.index(self.phase))


@dataclass(frozen=True)
class Limits:
    """When a step is taken for a hang."""

    factor: float
    minimum_seconds: float

    def seconds(self, durations: list[float]) -> float:
        """Longest time a step may take, given those before it; none before: ten times the minimum."""
        if not durations:
            return 10 * self.minimum_seconds  # compilation, first collectives, cold file systems
        return max(self.minimum_seconds, self.factor * statistics.median(durations))


@dataclass
class Watchdog:
    """Watches this process from a thread."""

    rank: int
    world_size: int
    limits: Limits
    notes: Notes
    stacks: Path
    """Where stacks are dumped."""
    on_hang: Callable[[str], None]
    """Told the verdict before the process ends."""
    _durations: deque[float] = field(default_factory=lambda: deque(maxlen=50))
    _step: int = 0
    _phase: str = PHASES[-1]
    _began: float = field(default_factory=time.monotonic)
    _noted: tuple[float, int, str] = (0.0, -1, "")
    _stopped: threading.Event = field(default_factory=threading.Event)
    _parent: int = field(default_factory=os.getppid)

    def start(self) -> None:
        """Start watching."""
        threading.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopped.set()

    def step_begins(self, step: int) -> None:
        """A step begins; the one before has ended."""
        self._step, self._phase, self._began = step, PHASES[0], time.monotonic()

    def phase(self, name: str) -> None:
        """The step goes on to another phase."""
        self._phase = name

    def step_ends(self) -> None:
        """The update is made: what follows until the next step is timed apart."""
        self._durations.append(time.monotonic() - self._began)
        self._began = time.monotonic()

    def pause(self) -> None:
        """No step is running: a stage is being prepared, which nothing is known of."""
        self._phase = PHASES[-1]

    def where(self) -> str:
        """Step and phase that this rank is in; empty while no step is running."""
        return "" if self._phase == PHASES[-1] else f"in step {self._step}, {self._phase}"

    def verdict(self) -> str | None:
        """What is wrong, when this rank's time is up; reads the other ranks' notes."""
        elapsed = time.monotonic() - self._began
        limit = self.limits.seconds(list(self._durations))
        if self._phase in ("evaluation", "checkpoint"):
            limit *= UNMEASURED_FACTOR
        if self._phase == PHASES[-1] or elapsed <= limit:
            return None
        self._leave_note()
        late = furthest_behind(self._read_notes())
        names = ", ".join(f"rank {w.rank} on {w.host} (step {w.step}, {w.phase})" for w in late)
        return (
            f"rank {self.rank} on {socket.gethostname()} has been in step {self._step} ({self._phase})"
            f" for {elapsed:.0f} s, the limit is {limit:.0f} s; furthest behind: {names}"
        )

    def _watch(self) -> None:
        while not self._stopped.wait(POLL_SECONDS):
            if os.getppid() != self._parent:
                os._exit(ExitCode.RETRYABLE)  # the agent is gone, nobody would collect this process
            when, step, phase = self._noted
            if (step, phase) != (self._step, self._phase) and time.monotonic() - when > NOTE_SECONDS:
                self._leave_note()
            if text := self.verdict():
                self._give_up(text)

    def _leave_note(self) -> None:
        note = {"host": socket.gethostname(), "step": self._step, "phase": self._phase}
        self.notes.set(_key(self.rank), json.dumps(note))
        self._noted = (time.monotonic(), self._step, self._phase)

    def _read_notes(self) -> list[Whereabouts]:
        ranks = [rank for rank in range(self.world_size) if self.notes.check([_key(rank)])]
        return [Whereabouts(rank, **json.loads(self.notes.get(_key(rank)))) for rank in ranks]

    def _give_up(self, text: str) -> None:
        print(f"hang: {text}", file=sys.stderr, flush=True)
        self.stacks.parent.mkdir(parents=True, exist_ok=True)
        with self.stacks.open("w") as file:
            faulthandler.dump_traceback(file, all_threads=True)
        self.on_hang(text)
        time.sleep(GRACE_SECONDS)
        os._exit(ExitCode.RETRYABLE)


def furthest_behind(notes: list[Whereabouts]) -> list[Whereabouts]:
    """The ranks that the others wait for (at most four)."""
    if not notes:
        return []
    last = min(note.order for note in notes)
    return [note for note in notes if note.order == last][:4]


def _key(rank: int) -> str:
    return f"whereabouts/{rank}"
