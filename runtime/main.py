"""Entry point of every training process: `python -m shipway.runtime.main BUILD --run-dir RUN`.

Started by torchrun on every rank. Exit codes: `shipway.runtime.exit_codes`.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.exit_codes import ExitCode
from shipway.runtime.imports import uncollected_imports
from shipway.runtime.run_folder import RunFolder


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Train; returns the exit code, and leaves the reason in the run's folder."""
    options = _parser().parse_args(arguments)
    with uncollected_imports():
        from shipway.runtime.distributed import join, leave
        from shipway.runtime.failures import classify, is_expected
        from shipway.runtime.session import train_here
        from shipway.runtime.signals import StopRequest
    run, rank = RunFolder(options.run_dir), int(os.environ.get("RANK", "0"))
    run.write_pid(rank)
    # Attention residuals pass their sources on through every layer, unchanged and never written into.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
    _die_while_starting()
    try:
        code = train_here(options.build, run, join(options.device), StopRequest(), options.until)
        reason = code.words
        leave()
    except BaseException as error:
        code, reason = classify(error)
        if not is_expected(error):
            traceback.print_exc()
        print(f"rank {rank} on {socket.gethostname()}: {reason}", file=sys.stderr, flush=True)
    run.write_exit(rank, code, reason)
    return code


def _die_while_starting() -> None:
    """Until training takes the signals over a stop ends this process at once: there is nothing to save, and
    a rank that waits for peers which a stop has ended already would hear of none."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # a profile is asked for; it is too early


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shipway.runtime.main", description=__doc__)
    parser.add_argument("build", type=Path, help="folder that `shipway build` wrote")
    parser.add_argument("--run-dir", type=Path, required=True, help="folder of the run, new or old")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is one")
    parser.add_argument("--until", metavar="STAGE", help="last stage to train here; by default all of them")
    return parser


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for peers which may be gone must not keep a failed process.
    os._exit(ended)
