"""Reading and writing what a run's folder keeps: the record, the attempts, and how far it got."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path

from pydantic import ValidationError

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.target import Run
from shipway.compiler.writing import write_file
from shipway.schemas.run import ATTEMPTS_FILE, HALT_FILE, RECORD_FILE, Attempt, Job, RunRecord

CHECKPOINT_MARKER = "complete.json"
"""File that the runtime writes last into a checkpoint."""


@frozen
class Progress:
    """The newest line of a run's metrics."""

    stage: str
    step: int
    loss: float


def now() -> str:
    """The time, as records have it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def new_run_id(name: str, runs: Path) -> str:
    """A name for a run that no folder in `runs` has: the blueprint's, and when it was started."""
    stem = f"{name}-{datetime.now(UTC).strftime('%Y%m%d-%H%M%S')}"
    taken = {path.name for path in runs.glob(f"{stem}*")}
    return next(name for name in (stem, *(f"{stem}-{n}" for n in range(2, 1000))) if name not in taken)


def read_record(folder: Path) -> RunRecord | None:
    """The record of a run, with the jobs that its scripts replaced; None when none can be read."""
    try:
        record = RunRecord.model_validate_json((folder / RECORD_FILE).read_text())
    except (OSError, ValidationError, UnicodeDecodeError):
        return None
    return record.model_copy(update={"jobs": _current_jobs(folder, record.jobs)})


def unreadable(folder: Path) -> str | None:
    """Why the record of a run that is there cannot be read; None when it can, or there is none."""
    path = folder / RECORD_FILE
    try:
        RunRecord.model_validate_json(path.read_text())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        return (error.strerror or "error").lower()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return ": ".join([*(".".join(map(str, first["loc"])),) * bool(first["loc"]), first["msg"]])
    except UnicodeDecodeError:
        return "it is no text"
    return None


def write_record(folder: Path, record: RunRecord) -> None:
    """Write the record so that readers see the old one or the new one, never a part."""
    write_file(folder / RECORD_FILE, json.dumps(record.model_dump(mode="json"), indent=1) + "\n")


def read_attempts(folder: Path) -> list[Attempt]:
    """Finished attempts in the order they were made."""
    found = []
    path = folder / ATTEMPTS_FILE
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            found.append(Attempt.model_validate_json(line))
        except ValidationError:
            continue  # a line that is being written
    return found


def read_progress(folder: Path) -> Progress | None:
    """The last line of metrics.jsonl that is whole; None before the first step."""
    path = folder / "metrics.jsonl"
    if not path.exists():
        return None
    for line in reversed(_tail(path).splitlines()):
        try:
            value = json.loads(line)
            return Progress(str(value["stage"]), int(value["step"]), float(value["loss"]))
        except (ValueError, KeyError, TypeError):
            continue
    return None


def run_status(folder: Path) -> dict[str, object]:
    """status.json as the trainer and the supervisor write it; empty when there is none."""
    try:
        value = json.loads((folder / "status.json").read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def newest_checkpoint(folder: Path) -> Path | None:
    """The newest checkpoint whose completion marker is there; None before the first."""
    finished = sorted((folder / "checkpoints").glob(f"step-*/{CHECKPOINT_MARKER}"))
    return finished[-1].parent if finished else None


def is_done(folder: Path, stages: tuple[str, ...]) -> bool:
    """Whether the whole programme is trained: the last stage has an attempt that finished it."""
    return any(a.stage == stages[-1] and a.reason == "done" for a in read_attempts(folder))


def halt(folder: Path) -> None:
    """Keep everyone from starting this run again."""
    (folder / HALT_FILE).write_text("0\n")


def lift_halt(folder: Path) -> None:
    """Let the run be started again."""
    (folder / HALT_FILE).unlink(missing_ok=True)


def all_runs(runs: Path) -> list[tuple[Run, RunRecord]]:
    """Runs in a folder, newest first."""
    found = [(folder, read_record(folder)) for folder in runs.glob("*/")] if runs.is_dir() else []
    known = [(Run(folder, Path(record.build)), record) for folder, record in found if record is not None]
    return sorted(known, key=lambda pair: pair[1].launched_at, reverse=True)


def _current_jobs(folder: Path, jobs: tuple[Job, ...]) -> tuple[Job, ...]:
    """Jobs as the submit script and the batch scripts last noted them: a file a stage, `ID STAGE`.

    Where the client died before it could write the record, the notes are all there is.
    """
    lines = [path.read_text().split(maxsplit=1) for path in sorted((folder / "jobs").glob("*"))]
    noted = {line[1].strip(): line[0] for line in lines if len(line) == 2}
    if not jobs:
        return tuple(Job(stage=stage, id=job) for stage, job in noted.items())
    return tuple(Job(stage=job.stage, id=noted.get(job.stage, job.id)) for job in jobs)


def _tail(path: Path, size_bytes: int = 65536) -> str:
    with path.open("rb") as file:
        file.seek(0, 2)
        file.seek(max(0, file.tell() - size_bytes))
        return file.read().decode(errors="replace")
