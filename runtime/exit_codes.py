"""Exit codes that launch scripts and the supervisor act on (the contract with every launch target)."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """Reserved exit codes of `python -m shipway.runtime.main`."""

    DONE = 0
    """The programme is finished."""
    PREEMPTED = 75
    """Asked to stop, saved; start me again."""
    RETRYABLE = 76
    """Failed for a reason outside the configuration (a lost rank, a full disk); start me again."""
    FATAL = 77
    """Would fail again the same way (bad configuration, non-finite loss); never start me again."""
    NO_PROGRESS = 78
    """Restarted without finishing one step since the last start; stop the chain."""

    @property
    def restarts(self) -> bool:
        """Whether a supervisor should start the run again."""
        return self in (ExitCode.PREEMPTED, ExitCode.RETRYABLE)

    @property
    def words(self) -> str:
        """For records and people."""
        return self.name.lower().replace("_", " ")


class Fatal(Exception):  # noqa: N818 - names the exit code, not a kind of error
    """A failure that a restart would only repeat; the message is for the user."""


class Retryable(Exception):  # noqa: N818 - names the exit code, not a kind of error
    """A failure that a restart from the last checkpoint may cure; the message is for the user."""
