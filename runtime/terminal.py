"""The supervisor's terminal, for rank 0's live panel: workers have sessions and log files of their own."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import TextIO

from rich.console import Console

VARIABLE = "SHIPWAY_TERMINAL"
"""Names the terminal to workers; unset where there is none."""


def terminal_here() -> str | None:
    """The terminal that this process prints to; None where it is a file or a pipe."""
    try:
        return os.ttyname(sys.stdout.fileno())
    except (OSError, ValueError):
        return None


def console_on_terminal() -> Console | None:
    """A console on the terminal that the supervisor named; None without one."""
    name = os.environ.get(VARIABLE)
    if not name:
        return None
    try:
        # Without NOCTTY the terminal would become this session's, and its Ctrl-C ours.
        descriptor = os.open(name, os.O_WRONLY | os.O_NOCTTY)
        columns = os.get_terminal_size(descriptor).columns
    except OSError:
        return None
    file = Forgiving(os.fdopen(descriptor, "w"))
    return Console(file=file, force_terminal=True, width=columns)  # type: ignore[arg-type]


class Forgiving:
    """A text stream whose reader may go away."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write what can be written."""
        with contextlib.suppress(OSError, ValueError):
            return self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Flush what can be flushed."""
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        """It was one when it was opened."""
        return True
