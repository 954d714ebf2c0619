"""`python -m shipway.runtime.preflight node|verdict|fabric BUILD --run-dir RUN`.

node      on every node by itself: devices, driver, links, interfaces, storage; never fails, writes a report
verdict   once: a table of all reports, the nodes to exclude and those to use; code 4 when too few are left
fabric    on every rank under torchrun: the plan's collectives over the plan's groups; code 4 when one is slow
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.imports import uncollected_imports

ENVIRONMENT_CODE = 4


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the three; returns the exit code."""
    parser = argparse.ArgumentParser(prog="shipway.runtime.preflight", description=__doc__)
    parser.add_argument("check", choices=["node", "verdict", "fabric"])
    parser.add_argument("build", type=Path)
    parser.add_argument("nodes", nargs="*", help="verdict: nodes of the job, in order")
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--need", type=int, help="verdict: nodes that the stage takes")
    parser.add_argument("--stage", help="fabric: stage of the plan")
    options = parser.parse_intermixed_args(arguments)
    try:
        return run(options)
    except Fatal as error:
        print(f"preflight: {error}", file=sys.stderr)
        return ENVIRONMENT_CODE


def run(options: argparse.Namespace) -> int:
    """Dispatch; each check imports what it needs when it runs, as `verdict` need not wait for torch."""
    folder: Path = options.run_dir / "preflight"
    folder.mkdir(parents=True, exist_ok=True)
    if options.check == "verdict":
        from shipway.runtime.preflight.verdict import verdict

        return 0 if verdict(folder, options.nodes, options.need or len(options.nodes)) else ENVIRONMENT_CODE
    from shipway.runtime.build_folder import read_plan

    plan = read_plan(options.build)
    if options.check == "node":
        from shipway.runtime.preflight.node import check_node

        check_node(plan, folder)
        return 0
    with uncollected_imports():
        from shipway.runtime.preflight.fabric import check_fabric

    return 0 if check_fabric(plan, options.stage, folder) else ENVIRONMENT_CODE


if __name__ == "__main__":
    sys.exit(main())
