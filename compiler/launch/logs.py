"""Logs in a run's folder: a scheduler's or host's, whose lines name their rank, or torchrun's own."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shipway.compiler.launch import record

_OF_RANK = re.compile(r"attempt_\d+/(\d+)/(stdout|stderr)\.log$")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class LogFile:
    """One file, the words before each of its lines, and the mark of the lines that are wanted."""

    path: Path
    prefix: str = ""
    only: str = ""

    def lines(self, text: str) -> Iterator[str]:
        """Lines of `text` as they are shown."""
        for line in text.splitlines():
            if self.only in line:
                yield f"{self.prefix}{line}"


def log_files(folder: Path, *, attempt: int | None = None, rank: int | None = None) -> list[LogFile]:
    """Files of a run, oldest first; of one machine those of the newest attempt, or of one."""
    shared = sorted((folder / "logs").glob("*"), key=lambda path: path.stat().st_mtime)
    if shared and attempt is None:
        return [LogFile(path, only=f"[rank {rank}]" if rank is not None else "") for path in shared]
    numbers = sorted(int(path.name) for path in (folder / "attempts").glob("*") if path.name.isdigit())
    if not numbers:
        return []
    found = []
    for path in sorted((folder / "attempts" / str(attempt or numbers[-1]) / "logs").rglob("*.log")):
        match = _OF_RANK.search(path.as_posix())
        if match and rank in (None, int(match.group(1))):
            found.append(LogFile(path, f"[rank {match.group(1)}] "))
    return found


def print_files(files: list[LogFile]) -> None:
    """Print them one after another."""
    for file in files:
        for line in file.lines(file.path.read_text(errors="replace")):
            print(line)


def follow_lines(folder: Path, *, attempt: int | None, rank: int | None) -> None:
    """Print lines as they are written, in new attempts too, until the run has ended or Ctrl-C."""
    offsets: dict[Path, int] = {}
    while True:
        # Jobs of a scheduler follow one another: only the supervisor's own word ends a run here.
        own_word = None if (folder / "logs").exists() else record.run_status(folder).get("state")
        ended = own_word not in ("running", None)
        for file in log_files(folder, attempt=attempt, rank=rank):
            with file.path.open("rb") as stream:
                stream.seek(offsets.get(file.path, 0))
                text = stream.read()
            whole = text[: text.rfind(b"\n") + 1]
            offsets[file.path] = offsets.get(file.path, 0) + len(whole)
            for line in file.lines(whole.decode(errors="replace")):
                print(line)
        sys.stdout.flush()
        if ended:
            return
        time.sleep(POLL_SECONDS)
