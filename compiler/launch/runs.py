"""What commands on a run share: finding it, and where it stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shipway.compiler.launch import record
from shipway.compiler.launch.launch import execute
from shipway.compiler.launch.target import JobState, Run, State, Target
from shipway.compiler.launch.targets import target_named
from shipway.schemas.run import HALT_FILE, Attempt, RunRecord

_OF_TRAINER: dict[str, State] = {
    "running": "running", "done": "done", "preempted": "stopped", "stopped": "stopped",
    "retryable": "failed", "fatal": "failed", "no progress": "failed",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """One run."""

    run: Run
    record: RunRecord
    target: Target


@dataclass(frozen=True)
class RunStatus:
    """Where a run stands."""

    state: State
    detail: str
    jobs: tuple[JobState, ...]
    attempts: tuple[Attempt, ...]
    progress: record.Progress | None
    checkpoint: Path | None
    """Newest finished checkpoint."""


def find(runs: Path, name: str | None) -> Found | None:
    """The run called `name` (or in the folder `name`), or the newest; None when there is none."""
    if name is not None:
        candidates = [Path(name), runs / name]
        folder = next((path for path in candidates if record.read_record(path) is not None), None)
    else:
        known = record.all_runs(runs)
        folder = known[0][0].folder if known else None
    if folder is None:
        return None
    entry = record.read_record(folder)
    assert entry is not None
    return Found(Run(folder.resolve(), Path(entry.build)), entry, target_named(entry.target))


def status(found: Found) -> RunStatus:
    """The scheduler's word where there is a scheduler, the run's own folder elsewhere."""
    folder = found.run.folder
    jobs: list[JobState] = []
    for command in found.target.status(found.record):
        code, output = execute(command)
        if code == 0:
            jobs += found.target.states(found.record, output)
    attempts = tuple(record.read_attempts(folder))
    progress = record.read_progress(folder)
    state, detail = _overall(folder, jobs, attempts)
    return RunStatus(state, detail, tuple(jobs), attempts, progress, record.newest_checkpoint(folder))


def _overall(folder: Path, jobs: list[JobState], attempts: tuple[Attempt, ...]) -> tuple[State, str]:
    last = attempts[-1].reason if attempts else ""
    states = {job.state for job in jobs}
    for state in ("running", "waiting"):
        if state in states:
            return state, next(job.detail for job in jobs if job.state == state)
    if (folder / HALT_FILE).exists() and last in ("fatal", "no progress"):
        return "failed", last
    if not jobs:
        own = record.run_status(folder)
        word = str(own.get("state", "unknown"))
        alive = _process_alive(folder)
        if alive and word != "done":  # also while it starts, or pauses between two attempts
            return "running", ""
        if word == "running":
            return "failed", "its supervisor is gone; `shipway resume` goes on from the last checkpoint"
        return _OF_TRAINER.get(word, "unknown"), str(own.get("reason") or last)
    return _OF_TRAINER.get(last, "unknown"), last


def _process_alive(folder: Path) -> bool:
    for name in ("supervisor.pid", "driver.pid"):
        path = folder / name
        if path.exists() and Path("/proc", path.read_text().strip()).exists():
            return True
    return False
