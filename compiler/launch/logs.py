"""Logs in a run's folder: a scheduler's or host's, whose lines name their rank, or torchrun's own."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from shipway.compiler.launch.target import Command

_OF_RANK = re.compile(r"attempt_\d+/(\d+)/(stdout|stderr)\.log$")
_MARK = re.compile(r"\[rank (\d+)\] ?")
POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Line:
    """One line of a log."""

    text: str
    """As a person sees it, with what stands before it: a rank, a host, a pod."""
    rank: int | None
    """Rank that wrote it; None for what scripts and schedulers say."""


@dataclass(frozen=True)
class LogFile:
    """One file, the rank that wrote all of it (else each line names its own), and the rank that is wanted."""

    path: Path
    rank: int | None = None
    only: int | None = None

    def lines(self, text: str) -> Iterator[Line]:
        """Lines of `text` as they are shown."""
        if self.rank is None:
            yield from marked(text.splitlines(), self.only)
        else:
            yield from (Line(f"[rank {self.rank}] {line}", self.rank) for line in text.splitlines())


def marked(lines: Iterable[str], only: int | None) -> Iterator[Line]:
    """Lines that name their rank; those of rank `only` where one is asked for."""
    for text in lines:
        found = _MARK.search(text)
        rank = int(found.group(1)) if found else None
        if only is None or rank == only:
            yield Line(text.rstrip("\r\n"), rank)


def log_files(folder: Path, *, attempt: int | None = None, rank: int | None = None) -> list[LogFile]:
    """Files of a run, oldest first; of one machine those of the newest attempt, or of one."""
    shared = sorted((folder / "logs").glob("*"), key=lambda path: path.stat().st_mtime)
    if shared and attempt is None:
        return [LogFile(path, only=rank) for path in shared]
    numbers = sorted(int(path.name) for path in (folder / "attempts").glob("*") if path.name.isdigit())
    if not numbers:
        return []
    found = []
    for path in sorted((folder / "attempts" / str(attempt or numbers[-1]) / "logs").rglob("*.log")):
        match = _OF_RANK.search(path.as_posix())
        if match and rank in (None, int(match.group(1))):
            found.append(LogFile(path, int(match.group(1))))
    return found


def read_lines(files: list[LogFile]) -> Iterator[Line]:
    """Files one after another."""
    for file in files:
        yield from file.lines(file.path.read_text(errors="replace"))


def follow_lines(
    folder: Path, ended: Callable[[], bool], *, attempt: int | None, rank: int | None
) -> Iterator[Line]:
    """Lines as they are written, in new attempts too, until the run has `ended`."""
    offsets: dict[Path, int] = {}
    while True:
        last = ended()  # before reading, so that what was written until then is read
        for file in log_files(folder, attempt=attempt, rank=rank):
            with file.path.open("rb") as stream:
                stream.seek(offsets.get(file.path, 0))
                text = stream.read()
            whole = text if last else text[: text.rfind(b"\n") + 1]
            offsets[file.path] = offsets.get(file.path, 0) + len(whole)
            yield from file.lines(whole.decode(errors="replace"))
        if last:
            return
        time.sleep(POLL_SECONDS)


def command_lines(command: Command, rank: int | None) -> Iterator[Line]:
    """What a command prints, line by line; raises CalledProcessError, or FileNotFoundError without it."""
    process = subprocess.Popen(command.arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(command.stdin)
        process.stdin.close()
        yield from marked(process.stdout, rank)
    finally:
        process.stdout.close()
        code = process.wait()
    if code:
        raise subprocess.CalledProcessError(code, command.arguments)
