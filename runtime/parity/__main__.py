"""Which layouts train what one process trains, shown by training.

`python -m shipway.runtime.parity [--device cuda] [--dtype bf16] [--only NAME]` runs small generated models
for a few steps from one seed, under every layout of the table and under those that the planner itself
proposes, on real process groups. Loss, gradient norm, every gradient and the experts' loads are held against
those of one process. Exit code 1 when a layout is off.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parity.judge import Models, judge
from shipway.runtime.parity.proposals import proposals
from shipway.runtime.parity.report import keep, show, to_json
from shipway.runtime.parity.table import ROWS, Row
from shipway.runtime.parity.verdict import TOLERANCES, Verdict

MOST_PROCESSES = 8
"""On a CPU."""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when no layout that runs is off."""
    options = _options(arguments)
    most = torch.cuda.device_count() if options.device == "cuda" else MOST_PROCESSES
    rows = _chosen(options)
    runnable = {name: row for name, row in rows.items() if row.layout.world_size <= most}
    tolerance = TOLERANCES[options.device, options.dtype]

    def tell(verdicts: Sequence[Verdict]) -> None:
        if options.keep:
            keep(options.keep, verdicts, tolerance, options.device, options.dtype)

    with TemporaryDirectory() as folder:
        models = Models(Path(folder), options.build, options.dtype)
        verdicts = judge(runnable, models, options.device, options.dtype, tell)
    if options.json:
        print(to_json(verdicts, tolerance, options.device, options.dtype))
    else:
        show(verdicts, tolerance, options.device, options.dtype)
    if len(runnable) < len(rows):
        left_out = "; ".join(name for name in rows if name not in runnable)
        print(f"left out for want of devices: {left_out}", file=sys.stderr)
    return int(any(not v.refused and not v.proven(tolerance) for v in verdicts))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m shipway.runtime.parity", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp8"), default="fp32", help="what is computed in"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="may be given again")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the table")
    parser.add_argument(
        "--planned", choices=("too", "only", "not"), default="too", help="layouts that the planner proposes"
    )
    parser.add_argument("--json", action="store_true", help="print data as JSON, alone on standard output")
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="keep verdicts there and in FILE.md")
    parser.add_argument("--build", type=Path, help="a build folder; by default the table's models are built")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in ROWS]
    if unknown:
        parser.error(f"no layout {', '.join(map(repr, unknown))}; there are: {'; '.join(ROWS)}")
    return options


def _chosen(options: argparse.Namespace) -> dict[str, Row]:
    if options.only:
        return {name: ROWS[name] for name in options.only}
    rows = {} if options.planned == "only" else dict(ROWS)
    rows |= {} if options.planned == "not" else proposals()
    part, parts = map(int, options.part.split("/"))
    return dict(list(rows.items())[part - 1 :: parts])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fatal as error:
        sys.exit(f"parity: {error}")
