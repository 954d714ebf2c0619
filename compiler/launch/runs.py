"""What commands on a run share: finding it, and where it stands."""

from __future__ import annotations

from pathlib import Path

from shipway.compiler.frozen import frozen
from shipway.compiler.launch import record
from shipway.compiler.launch.excluded import accused
from shipway.compiler.launch.execute import execute
from shipway.compiler.launch.processes import agents, leader, stray_workers
from shipway.compiler.launch.target import JobState, Run, State, Target
from shipway.compiler.launch.targets import target_named
from shipway.schemas.run import HALT_FILE, Attempt, RunRecord

_OF_TRAINER: dict[str, State] = {
    "running": "running", "done": "done", "preempted": "stopped", "stopped": "stopped",
    "retryable": "failed", "fatal": "failed", "no progress": "failed",
}  # fmt: skip


_FORGOTTEN = ("Invalid job id", "NotFound", "already completing or completed")


def is_forgotten(output: str) -> bool:
    """Whether a scheduler says that a job ended, long ago or just now, or was removed."""
    return any(words in output for words in _FORGOTTEN)


@frozen
class Found:
    """One run."""

    run: Run
    record: RunRecord
    target: Target


@frozen
class RunStatus:
    """Where a run stands."""

    state: State
    detail: str
    jobs: tuple[JobState, ...]
    attempts: tuple[Attempt, ...]
    progress: record.Progress | None
    checkpoint: Path | None
    """Newest finished checkpoint."""
    bad_nodes: tuple[str, ...] = ()
    """Nodes that ended it, by the cluster's word; the next launch stays off them."""


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


def running(runs: Path) -> list[Found]:
    """Runs that are running and were not told to stop, newest first."""
    found = []
    for run, entry in record.all_runs(runs):
        # No scheduler is asked about a run that is over.
        each = None if _is_over(run.folder, entry) else find(runs, str(run.folder))
        if each is not None and status(each).state == "running":
            found.append(each)
    return found


def _is_over(folder: Path, entry: RunRecord) -> bool:
    """Whether a run's own folder says that it was told to stop, or has finished."""
    if (folder / HALT_FILE).exists():
        return True
    if entry.jobs:  # the trainer is done with a stage, not with the run
        return record.is_done(folder, tuple(job.stage for job in entry.jobs))
    return record.run_status(folder).get("state") == "done"


def status(found: Found) -> RunStatus:
    """The scheduler's word where there is a scheduler, the run's own folder elsewhere."""
    folder = found.run.folder
    jobs, silence = _ask(found)
    attempts = tuple(record.read_attempts(folder))
    progress = record.read_progress(folder)
    state, detail = _overall(folder, jobs, silence, attempts)
    bad = accused(found.target, found.record) if state == "failed" else ()
    if bad:
        way = "" if found.target.keeps(bad) else "; `shipway resume` goes on without"
        detail = f"the pre-flight found {', '.join(bad)} bad{way}"
    return RunStatus(state, detail, jobs, attempts, progress, record.newest_checkpoint(folder), bad)


def _ask(found: Found) -> tuple[tuple[JobState, ...], str]:
    """States of the run's jobs, and what the scheduler said instead of an answer."""
    answers, silence = "", ""
    commands = found.target.status(found.record)
    for command in commands:
        code, output = execute(command)
        if code == 0:
            answers += output
        elif not is_forgotten(output):
            silence = output.strip().splitlines()[-1] if output.strip() else "no answer"
    if not commands or silence:
        return (), silence
    return tuple(found.target.states(found.record, answers)), ""


def _overall(
    folder: Path, jobs: tuple[JobState, ...], silence: str, attempts: tuple[Attempt, ...]
) -> tuple[State, str]:
    last = attempts[-1].reason if attempts else ""
    states = {job.state for job in jobs}
    for state in ("running", "waiting"):
        if state in states:
            return state, next(job.detail for job in jobs if job.state == state)
    if silence:
        return "unknown", f"the scheduler does not answer: {silence}"
    if (folder / HALT_FILE).exists() and last in ("fatal", "no progress"):
        return "failed", last
    if not jobs:
        return _without_scheduler(folder, last)
    finished = {attempt.stage for attempt in attempts if attempt.reason == "done"}
    for job in jobs:
        if last == "done" and job.job.stage not in finished:
            return "stopped", f"stage {job.job.stage} has left the queue unfinished; `shipway resume` goes on"
    if not attempts:  # no word in this folder: its storage is the cluster's
        told = next((job for job in jobs if job.state != "done"), jobs[-1])
        state = "stopped" if (folder / HALT_FILE).exists() and told.state == "unknown" else told.state
        return state, told.detail
    return _OF_TRAINER.get(last, "unknown"), last


def _without_scheduler(folder: Path, last: str) -> tuple[State, str]:
    """What the run's own files and processes say."""
    own = record.run_status(folder)
    word = str(own.get("state", "unknown"))
    lead = leader(folder)
    if lead is not None and word != "done":  # also while it starts, or pauses between two attempts
        return "running", "" if lead.here else f"on {lead.host}"
    if stray_workers(folder) or agents(folder):
        return "running", "without its supervisor, which is gone; the workers save and end"
    if word == "running":
        return "failed", "its supervisor is gone; `shipway resume` goes on from the last checkpoint"
    state = _OF_TRAINER.get(word, "unknown")
    never = "nothing of it has started" if state == "unknown" and not last else last
    return state, str(own.get("reason") or never)
