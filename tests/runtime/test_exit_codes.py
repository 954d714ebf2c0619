"""What ends a run, and whether it is started again."""

from __future__ import annotations

import pytest
import torch

from shipway.runtime.data.errors import DataError
from shipway.runtime.elastic import combined_code
from shipway.runtime.exit_codes import ExitCode, Fatal, Retryable
from shipway.runtime.failures import classify


class Failure:
    """What torchrun's agent knows of a worker that failed."""

    def __init__(self, exitcode: int) -> None:
        self.exitcode = exitcode


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ([75, 75], ExitCode.PREEMPTED),
        ([76, 77], ExitCode.FATAL),
        ([76, -15], ExitCode.RETRYABLE),
        ([-9], ExitCode.RETRYABLE),
        ([1, -15], ExitCode.FATAL),
        ([75, -9], ExitCode.RETRYABLE),
        ([78, 76], ExitCode.NO_PROGRESS),
    ],
)
def test_gravest_reserved_code_of_the_ranks_counts(codes: list[int], expected: ExitCode) -> None:
    assert combined_code(dict(enumerate(map(Failure, codes)))) == expected  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (Fatal("bad layout"), ExitCode.FATAL),
        (DataError("no such file"), ExitCode.FATAL),
        (Retryable("disk full"), ExitCode.RETRYABLE),
        (OSError("stale handle"), ExitCode.RETRYABLE),
        (RuntimeError("[gloo] Connection closed by peer"), ExitCode.RETRYABLE),
        (torch.OutOfMemoryError("out of memory"), ExitCode.FATAL),
        (ZeroDivisionError("a bug"), ExitCode.FATAL),
    ],
)
def test_failures_are_retried_only_when_that_may_help(error: Exception, expected: ExitCode) -> None:
    assert classify(error)[0] is expected


def test_only_preempted_and_retryable_restart() -> None:
    assert [code for code in ExitCode if code.restarts] == [ExitCode.PREEMPTED, ExitCode.RETRYABLE]
