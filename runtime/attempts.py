"""What remains of each start of a run: exit reasons of ranks, the list of attempts, stray workers."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shipway.runtime.exit_codes import ExitCode
from shipway.schemas.run import ATTEMPTS_FILE, Attempt

STRAY_SECONDS = 600.0
"""How long workers without a supervisor are given to save."""
_GRAVITY = (ExitCode.FATAL, ExitCode.NO_PROGRESS, ExitCode.RETRYABLE, ExitCode.PREEMPTED, ExitCode.DONE)


def next_number(run: Path) -> int:
    """Number of the next attempt, from 1."""
    numbers = [int(f.name) for f in (run / "attempts").glob("*") if f.name.isdigit()]
    return max(numbers, default=0) + 1


def append_attempt(run: Path, attempt: Attempt) -> None:
    """One more line of attempts.jsonl."""
    with (run / ATTEMPTS_FILE).open("a") as file:
        file.write(attempt.model_dump_json() + "\n")


def explain(folder: Path, code: ExitCode) -> str:
    """Why an attempt ended: the words of the rank whose code is the gravest, with rank and host."""
    reasons = _rank_reasons(folder)
    killed = _killed_workers(folder)
    if killed and code is ExitCode.RETRYABLE:
        return killed  # what the others say of a lost peer is only its consequence
    for grave in _GRAVITY:
        for entry in reasons:
            if entry["code"] == grave:
                return f"rank {entry['rank']} on {entry['host']}: {entry['reason']}"
    return killed or "the workers left no word: they were killed, or never started"


def explain_stop(folder: Path, *, killed: bool) -> str:
    """What became of the workers that were asked to stop, or killed on the second request."""
    if killed:
        return "the workers were killed"
    reasons = _rank_reasons(folder)
    for entry in reasons:
        if entry["code"] not in (ExitCode.PREEMPTED, ExitCode.DONE):
            return f"rank {entry['rank']} on {entry['host']}: {entry['reason']}"
    return "the workers saved" if reasons else "the workers were stopped before they could save"


def kill_workers(folder: Path) -> None:
    """Kill workers of an attempt that outlived their agent, by the process ids they left."""
    for path, pid in _workers(folder).items():
        with contextlib.suppress(OSError):
            if pid is not None:
                os.kill(pid, signal.SIGKILL)
        path.unlink(missing_ok=True)


def end_strays(run: Path, say: Callable[[str], None], patience_seconds: float = STRAY_SECONDS) -> None:
    """End workers that a killed supervisor left training: two generations must not write one checkpoint.

    They are asked to save, and killed when they have not left in time.
    """
    folders = [folder for folder in run.glob("attempts/*") if any(_workers(folder).values())]
    if folders:
        say("workers of an earlier start are still training: they save and leave first")
    for folder in folders:
        for pid in filter(None, _workers(folder).values()):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + patience_seconds
    while any(any(_workers(folder).values()) for folder in folders) and time.monotonic() < until:
        time.sleep(0.2)
    for folder in folders:
        kill_workers(folder)


def _workers(folder: Path) -> dict[Path, int | None]:
    """Process ids that workers left, by file; None where that process is no worker of ours any more."""
    found: dict[Path, int | None] = {}
    for path in folder.glob("rank*.pid"):
        found[path] = None
        with contextlib.suppress(OSError, ValueError):
            pid = int(path.read_text())
            # The number may have been given to a stranger since.
            if b"shipway.runtime.main" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found[path] = pid
    return found


def record_deaths(folder: Path, deaths: dict[int, int]) -> None:
    """Note exit codes of ranks (negative: a signal) that torchrun's agent saw."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "deaths.json").write_text(json.dumps(deaths) + "\n")


def _rank_reasons(folder: Path) -> list[dict[str, Any]]:
    reasons = []
    for path in sorted(folder.glob("rank*.json")):
        with contextlib.suppress(OSError, ValueError):
            reasons.append(json.loads(path.read_text()))
    return reasons


def _killed_workers(folder: Path) -> str:
    try:
        deaths: dict[str, int] = json.loads((folder / "deaths.json").read_text())
    except (OSError, ValueError):
        return ""
    killed = {rank: -code for rank, code in deaths.items() if code < 0}
    names = [f"rank {rank} was killed by {signal.Signals(number).name}" for rank, number in killed.items()]
    return ", ".join(names)
