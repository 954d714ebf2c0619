"""The command line. Each file in `commands/` is one command, imported only when it is asked for."""

from __future__ import annotations

import gc
import sys

GARBAGE_THRESHOLD = 500_000
"""Objects made before Python looks for cycles among them: a command makes few cycles, and looking for them
while modules load (Python's own threshold is 700) takes longer than all the rest of a help page."""


def main() -> None:
    """Entry point of the `shipway` script."""
    gc.set_threshold(GARBAGE_THRESHOLD)
    from shipway.compiler.cli.planner import planner_for

    arguments = sys.argv[1:]
    with planner_for(arguments) as planner:
        from shipway.compiler.cli.app import run

        status = run(arguments, planner)
    gc.freeze()  # else the program ends with a search for cycles among all that was loaded: a tenth of a plan
    sys.exit(status)
