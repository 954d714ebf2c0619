"""The command line. Each file in `commands/` is one command, imported only when it is asked for."""

from __future__ import annotations

import sys


def main() -> None:
    """Entry point of the `shipway` script."""
    from shipway.compiler.cli.app import run

    sys.exit(run(sys.argv[1:]))
