"""The folder of one run, and who writes what in it.

runs/<id>/plan.json            copy of the plan, by the supervisor
          status.json          state, step, attempt, exit reasons, by rank 0 and the supervisor
          starts.json          step at which each start began, by rank 0: tells a chain without progress
          metrics.jsonl        one line a step, by rank 0
          tensorboard/         the same for TensorBoard
          checkpoints/         by all ranks
          attempts/<n>/        rank<r>.json (exit reason), rank<r>.log, by each rank and the supervisor
          report.html          by rank 0 at each stage's end
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shipway.runtime.exit_codes import ExitCode

STARTS_WITHOUT_PROGRESS = 3


@dataclass(frozen=True)
class RunFolder:
    """Paths and small files of one run."""

    path: Path

    @property
    def checkpoints(self) -> Path:
        """Checkpoint folders."""
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        """Metrics, one JSON object a line."""
        return self.path / "metrics.jsonl"

    @property
    def attempt(self) -> Path:
        """Folder of this start; the supervisor or torchrun numbers it."""
        number = os.environ.get("SHIPWAY_ATTEMPT", os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
        return self.path / "attempts" / number

    def write_status(self, **fields: Any) -> None:
        """Merge fields into status.json, atomically."""
        status = self.read_status() | fields
        replace_text(self.path / "status.json", json.dumps(status, indent=1, sort_keys=True) + "\n")

    def read_status(self) -> dict[str, Any]:
        """status.json, empty when there is none yet."""
        return _read_json(self.path / "status.json")

    def read_environment(self) -> dict[str, Any]:
        """environment.json, empty when there is none yet."""
        return _read_json(self.path / "environment.json")

    def write_environment(self, found: Mapping[str, Any]) -> None:
        """What this start runs on, and the parameters it counts."""
        text = json.dumps(dict(found), indent=1, sort_keys=True) + "\n"
        replace_text(self.path / "environment.json", text)

    def record_start(self, step: int) -> bool:
        """Note that a start begins at `step`; False when too many starts in a row began there."""
        path = self.path / "starts.json"
        starts: list[int] = [*_read_json(path), step]
        replace_text(path, json.dumps(starts[-100:]) + "\n")
        recent = starts[-STARTS_WITHOUT_PROGRESS - 1 :]
        return len(recent) <= STARTS_WITHOUT_PROGRESS or len(set(recent)) > 1

    def write_pid(self, rank: int) -> None:
        """Leave this process's id, so that a supervisor can kill it when its agent is gone."""
        replace_text(self.attempt / f"rank{rank}.pid", f"{os.getpid()}\n")

    def write_exit(self, rank: int, code: ExitCode, reason: str) -> None:
        """Say why this rank ends; the supervisor reads it, since torchrun hides exit codes."""
        entry = {
            "rank": rank,
            "host": socket.gethostname(),
            "code": int(code),
            "reason": reason,
        }
        replace_text(self.attempt / f"rank{rank}.json", json.dumps(entry) + "\n")


def replace_text(path: Path, text: str) -> None:
    """Write a file so that readers see the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(path.name + f".{os.getpid()}.draft")
    draft.write_text(text)
    draft.replace(path)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
