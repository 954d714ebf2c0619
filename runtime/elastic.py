"""torchrun, with the two things that it lacks for us: exit codes and time to save.

    python -m shipway.runtime.elastic --nproc-per-node 8 ... -m shipway.runtime.main BUILD --run-dir RUN

Takes torchrun's arguments. torchrun ends with 1 whatever its workers said; this ends with their
reserved code. torchrun waits half a minute after a signal before it kills; this forwards SIGUSR1 too
and waits as long as a save may take (--shutdown-timeout, here before torch 2.13, too). And it ends as if
asked to when the supervisor that started it is gone.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shipway.runtime.attempts import record_deaths
from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.imports import uncollected_imports

with uncollected_imports():
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import PContext, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

FORWARDED_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
SAVE_SECONDS = "600"
SUPERVISOR = "SHIPWAY_SUPERVISOR"
"""Variable with the process id of the supervisor that starts this."""
LOOK_SECONDS = 0.5
"""Between two looks whether it is there."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the workers and return their exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    defaults = ["--signals-to-handle", FORWARDED_SIGNALS, *_patience(given)]
    os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "3")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    os.environ.setdefault("TORCH_NCCL_DUMP_ON_TIMEOUT", "1")
    # torchrun reports a worker's reserved code as an error with a traceback of its own.
    _silence("torch.distributed.elastic")
    if supervisor := os.environ.pop(SUPERVISOR, ""):
        threading.Thread(target=_stop_without, args=(int(supervisor),), daemon=True).start()
    try:
        run.main([*defaults, *given])
    except ChildFailedError as error:
        report_deaths(error.failures)
        return combined_code(error.failures)
    except SignalException as error:
        # The workers were told and have ended by now; they saved if they could.
        if "SHIPWAY_ATTEMPT_FOLDER" not in os.environ:  # a supervisor says it in its own words
            print(f"stopped by {signal.Signals(error.sigval).name}", file=sys.stderr, flush=True)
        return int(ExitCode.PREEMPTED)
    return int(ExitCode.DONE)


def _stop_without(supervisor: int) -> None:
    """Ask this process to stop, which tells its workers to save, once its supervisor was killed."""
    while os.getppid() == supervisor:
        time.sleep(LOOK_SECONDS)
    # To the main thread itself, so that it wakes up from whatever it waits for.
    signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGTERM)


def _patience(given: list[str]) -> list[str]:
    """Options that make torchrun wait for workers to save; takes them out of `given` where it knows none."""
    if "--shutdown-timeout" in run.get_args_parser().format_usage():
        return ["--shutdown-timeout", SAVE_SECONDS]
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--shutdown-timeout", "--shutdown_timeout", type=int, default=int(SAVE_SECONDS))
    options, given[:] = parser.parse_known_args(given)
    # Before torch 2.13 the wait is only to be had as the default of this method.
    close = PContext.close

    def patient(self: PContext, death_sig: Any = None, timeout: int = options.shutdown_timeout) -> None:
        close(self, death_sig, timeout)

    PContext.close = patient
    return []


def _silence(package: str) -> None:
    """Silence a package's loggers one by one: torch gives each a level of its own, so none inherits."""
    for name in (package, *logging.root.manager.loggerDict):
        if name == package or name.startswith(f"{package}."):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def report_deaths(failures: Mapping[int, ProcessFailure]) -> None:
    """Leave the exit codes where a supervisor can find them."""
    if folder := os.environ.get("SHIPWAY_ATTEMPT_FOLDER"):
        record_deaths(Path(folder), {rank: failure.exitcode for rank, failure in failures.items()})


def combined_code(failures: Mapping[int, ProcessFailure]) -> int:
    """One code for all ranks: fatal above all, then the others.

    A rank that dies takes others down with it, so the gravest code is the cause. A signal (negative)
    may not come again; what Python itself leaves with (an import that fails) will.
    """
    codes = {failure.exitcode for failure in failures.values()}
    if any(code > 0 and code not in set(ExitCode) for code in codes):
        return int(ExitCode.FATAL)
    for code in (ExitCode.FATAL, ExitCode.NO_PROGRESS, ExitCode.RETRYABLE):
        if code in codes:
            return int(code)
    return int(ExitCode.PREEMPTED if codes == {ExitCode.PREEMPTED} else ExitCode.RETRYABLE)


if __name__ == "__main__":
    sys.exit(main())
