"""What a failure means for the run: which exit code, and words that a person can act on."""

from __future__ import annotations

import torch
import torch.distributed as dist

from shipway.runtime.data.errors import DataError
from shipway.runtime.exit_codes import ExitCode, Fatal, Retryable

_LOST_PEER = ("Connection", "connection", "gloo", "NCCL", "timed out", "Timed out")


def classify(error: BaseException) -> tuple[ExitCode, str]:
    """Exit code of a failure and the words for it, with the step that it is noted to have been in."""
    code, text = _classify(error)
    notes = ", ".join(getattr(error, "__notes__", ()))
    return code, f"{text} ({notes})" if notes else text


def _classify(error: BaseException) -> tuple[ExitCode, str]:
    if isinstance(error, (Fatal, DataError)):
        return ExitCode.FATAL, str(error)
    if isinstance(error, Retryable):
        return ExitCode.RETRYABLE, str(error)
    if isinstance(error, torch.OutOfMemoryError):
        return ExitCode.FATAL, f"out of device memory; the plan's budget was too small: {error}"
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, (dist.DistError, OSError, KeyboardInterrupt)) or is_lost_peer(error):
        return ExitCode.RETRYABLE, text
    return ExitCode.FATAL, text


def is_expected(error: BaseException) -> bool:
    """Whether a failure needs no stack trace: its message says it all."""
    return isinstance(error, (Fatal, DataError, Retryable)) or is_lost_peer(error)


def is_lost_peer(error: BaseException) -> bool:
    """Whether another rank's end caused this: gloo reports a lost peer as a bare RuntimeError."""
    return isinstance(error, RuntimeError) and any(word in str(error) for word in _LOST_PEER)
