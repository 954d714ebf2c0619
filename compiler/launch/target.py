"""The protocol that every launch target follows.

A target never runs anything itself: it says which commands it would run, so that `--dry-run` can show
exactly those and tests can read them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Literal, Protocol

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.job import Programme
from shipway.schemas.diagnostics import Diagnostic
from shipway.schemas.run import Job, RunRecord

State = Literal["waiting", "running", "done", "stopped", "failed", "unknown"]


@frozen
class Command:
    """One command on this machine."""

    arguments: tuple[str, ...]
    purpose: str
    """Why it is run, for a person."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables on top of the caller's."""
    stdin: str = ""
    """What it reads."""
    foreground: bool = False
    """Whether it takes over the terminal until the run ends."""
    holds_signals: bool = False
    """Whether it starts with Ctrl-C and TERM held back, and lets them through once it can heed them."""


@frozen
class JobState:
    """What the scheduler says of one job."""

    job: Job
    state: State
    detail: str = ""
    """The scheduler's own words."""


@frozen
class Run:
    """A run's folder and where its build stands."""

    folder: Path
    build: Path
    launch: int = 1
    """Which launch of it this is: 2 when it is resumed for the first time."""

    @property
    def id(self) -> str:
        """Name of the run."""
        return self.folder.name


class Target(Protocol):
    """How one kind of cluster is used: render, check, submit, status, logs, cancel.

    `probe`, `submitted` and `states` are the other halves of check, submit and status: what to ask a
    cluster beforehand, and what its answers mean. `accusations`, `accused` and `keeps` are about bad nodes.
    """

    def render(self, programme: Programme) -> dict[str, str]:
        """Files of the build folder, by path relative to its `launch/`."""

    def check(self, programme: Programme, build: Path) -> list[Diagnostic]:
        """What would keep a launch from working, found without submitting anything."""

    def probe(self, programme: Programme, build: Path) -> list[Command]:
        """Commands that ask the cluster whether it would take the programme; code 0 says yes."""

    def submit(self, programme: Programme, run: Run) -> list[Command]:
        """Commands that start the run, or bring it back."""

    def submitted(self, programme: Programme, output: str) -> tuple[Job, ...]:
        """Jobs that the output of the commands of `submit` names."""

    def status(self, record: RunRecord) -> list[Command]:
        """Commands that ask for the state of the run's jobs."""

    def states(self, record: RunRecord, output: str) -> list[JobState]:
        """States in the output of the commands of `status`."""

    def logs(self, record: RunRecord, run: Run, *, follow: bool) -> list[Command] | None:
        """Commands that show the logs; None when they are files in the run's folder."""

    def cancel(self, record: RunRecord, run: Run) -> Sequence[Command]:
        """Commands that let running jobs save and leave, and drop waiting ones."""

    def accusations(self, record: RunRecord) -> Sequence[Command]:
        """Commands that ask the cluster which nodes failed; none when the run's folder says it already."""

    def accused(self, output: str) -> tuple[str, ...]:
        """Nodes in the output of the commands of `accusations`."""

    def keeps(self, nodes: Sequence[str]) -> Diagnostic | None:
        """Why a run cannot stay off `nodes` here; None when it can."""
