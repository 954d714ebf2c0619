"""Logs in a run's folder: a scheduler's or host's, whose lines name their rank, or torchrun's own."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.target import Command

_OF_RANK = re.compile(r"attempt_\d+/(\d+)/(stdout|stderr)\.log$")
_MARK = re.compile(r"\[rank (\d+)\] ?")
POLL_SECONDS = 0.5


@frozen
class Line:
    """One line of a log."""

    text: str
    """As a person sees it, with what stands before it: a rank, a host, a pod."""
    rank: int | None
    """Rank that wrote it; None for what scripts and schedulers say."""


@frozen
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
    """Files of a run, oldest first; of one machine those of one attempt, by default the last that wrote."""
    shared = sorted((folder / "logs").glob("*"), key=lambda path: path.stat().st_mtime)
    if shared and attempt is None:
        return [LogFile(path, only=rank) for path in shared]
    if attempt is None:
        attempt = last_written(folder)
    return [] if attempt is None else [file for file in _of(folder, attempt) if rank in (None, file.rank)]


def attempts(folder: Path) -> list[int]:
    """Numbers of the attempts that have a folder for logs of their own, in order."""
    return sorted(int(path.name) for path in (folder / "attempts").glob("*") if path.name.isdigit())


def last_written(folder: Path) -> int | None:
    """The last attempt in which any rank wrote something, else the newest; None when there is none."""
    numbers = attempts(folder)
    written = (n for n in reversed(numbers) if any(file.path.stat().st_size for file in _of(folder, n)))
    return next(written, numbers[-1] if numbers else None)


def ranks(folder: Path, *, attempt: int | None = None) -> list[int]:
    """Ranks that have logs, in order; where they share files, those that have written."""
    found: set[int | None] = set()
    for file in log_files(folder, attempt=attempt):
        if file.rank is not None:
            found.add(file.rank)
        else:
            found.update(line.rank for line in read_lines([file]))
    return sorted(rank for rank in found if rank is not None)


def _of(folder: Path, attempt: int) -> list[LogFile]:
    """Files of all ranks of one attempt."""
    paths = sorted((folder / "attempts" / str(attempt) / "logs").rglob("*.log"))
    matches = [(path, _OF_RANK.search(path.as_posix())) for path in paths]
    return [LogFile(path, int(match.group(1))) for path, match in matches if match]


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
