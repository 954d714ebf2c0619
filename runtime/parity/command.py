"""The `shipway` command, which the parity table plans and builds with as users do."""

from __future__ import annotations

import subprocess
import sys

from shipway.runtime.exit_codes import Fatal


def shipway(*arguments: str) -> str:
    """Run the command with this Python; its output, or Fatal with what it said."""
    command = [sys.executable, "-c", "from shipway.compiler.cli import main; main()", *arguments]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise Fatal(f"shipway {' '.join(arguments)} failed: {ran.stderr.strip() or ran.stdout.strip()}")
    return ran.stdout
