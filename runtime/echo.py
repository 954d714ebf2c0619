"""Rank 0's output on the terminal, copied from its log: no worker waits for a terminal or dies with it."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.1
STREAMS = {"stdout.log": "stdout", "stderr.log": "stderr"}


class Echo:
    """Copies what rank 0 of one attempt writes, from `start` until `finish`."""

    def __init__(self, logs: Path, *, files: Collection[str] = tuple(STREAMS)) -> None:
        self._logs, self._files = logs, files
        self._read: dict[Path, int] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="echo", daemon=True)

    def start(self) -> None:
        """Copy in the background."""
        self._thread.start()

    def finish(self) -> None:
        """Copy what is left; the workers have ended."""
        self._ended.set()
        self._thread.join()
        self._copy()

    def _follow(self) -> None:
        while not self._ended.wait(POLL_SECONDS):
            self._copy()

    def _copy(self) -> None:
        for path in sorted(self._logs.glob("*/attempt_*/0/*.log")):
            if path.name in self._files:
                with contextlib.suppress(OSError, ValueError):  # the terminal may be gone, the log is not
                    self._copy_file(path, getattr(sys, STREAMS[path.name]).buffer)

    def _copy_file(self, path: Path, to: BinaryIO) -> None:
        with path.open("rb") as file:
            file.seek(self._read.get(path, 0))
            text = file.read()
        self._read[path] = self._read.get(path, 0) + len(text)
        if text:
            to.write(text)
            to.flush()
