"""Which layouts train what one process trains, shown by training.

`python -m shipway.runtime.parity [--device cuda] [--dtype bf16] [--only NAME]` runs small generated models
for a few steps from one seed, under every layout of the table and under those that the planner itself
proposes, on real process groups. Loss, gradient norm, every gradient and the experts' loads are held against
those of one process; in bf16 both against one process in fp32. On GPUs bf16 takes the kernels that training
takes, fp32 the plain ones.

Exit code 1 when a layout is off, 3 when time (--seconds) was up before the end; --keep FILE.json --go-on
takes the rest another time. Where there is no planner, `--prepared FOLDER` takes what `--prepare` made there.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from shipway.runtime.exit_codes import Fatal
from shipway.runtime.parity.judge import Models, judge
from shipway.runtime.parity.proposals import proposals
from shipway.runtime.parity.report import keep, proven_before, show, to_json
from shipway.runtime.parity.table import ROWS, Row
from shipway.runtime.parity.verdict import Verdict
from shipway.schemas.layout import Layout

MOST_PROCESSES = 8
"""On a CPU."""
PROPOSALS = "proposals.json"
"""File of a prepared folder with the layouts that the planner proposes."""


def main(arguments: list[str] | None = None) -> int:
    """Print the table; 0 when no layout that runs is off."""
    options = _options(arguments)
    until = time.monotonic() + options.seconds
    if options.prepare:
        return _prepare(options)
    most = options.processes or (torch.cuda.device_count() if options.device == "cuda" else MOST_PROCESSES)
    rows = _chosen(options, most)
    runnable = {name: row for name, row in rows.items() if row.layout.world_size <= most}
    began = time.monotonic()

    def tell(verdict: Verdict) -> None:
        print(
            f"{time.monotonic() - began:6.1f} s  {verdict.name}: {verdict.word}", file=sys.stderr, flush=True
        )
        if options.keep:
            keep(options.keep, [verdict], options.device, options.dtype)

    with TemporaryDirectory() as folder:
        models = Models(options.prepared or Path(folder), options.device, options.dtype)
        verdicts = judge(runnable, models, tell, until)
    if options.json:
        print(to_json(verdicts, options.device, options.dtype))
    else:
        show(verdicts, options.device, options.dtype)
    if len(runnable) < len(rows):
        left_out = "; ".join(name for name in rows if name not in runnable)
        print(f"left out for want of devices: {left_out}", file=sys.stderr)
    if len(verdicts) < len(runnable):
        print(f"time was up before {len(runnable) - len(verdicts)} layouts", file=sys.stderr)
    off = any(not v.refused and not v.proven for v in verdicts)
    return 1 if off else 3 if len(verdicts) < len(runnable) else 0


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m shipway.runtime.parity",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp8"), default="fp32", help="what is computed in"
    )
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="may be given again")
    parser.add_argument("--part", default="1/1", metavar="K/N", help="the K-th of N parts of the table")
    parser.add_argument("--processes", type=int, metavar="N", help="most that a layout may take")
    parser.add_argument(
        "--planned", choices=("too", "only", "not"), default="too", help="layouts that the planner proposes"
    )
    parser.add_argument("--json", action="store_true", help="print data as JSON, alone on standard output")
    parser.add_argument("--keep", type=Path, metavar="FILE.json", help="keep verdicts there and in FILE.md")
    parser.add_argument("--go-on", action="store_true", help="leave out what --keep holds proven")
    parser.add_argument("--seconds", type=float, default=math.inf, help="end after so many")
    parser.add_argument("--prepare", type=Path, metavar="FOLDER", help="build and plan into it, run nothing")
    parser.add_argument("--prepared", type=Path, metavar="FOLDER", help="take builds and plans from it")
    options = parser.parse_args(arguments)
    unknown = [name for name in options.only if name not in ROWS]
    if unknown:
        parser.error(f"no layout {', '.join(map(repr, unknown))}; there are: {'; '.join(ROWS)}")
    if options.go_on and not options.keep:
        parser.error("--go-on needs --keep FILE.json")
    return options


def _chosen(options: argparse.Namespace, most: int) -> dict[str, Row]:
    if options.only:
        return {name: ROWS[name] for name in options.only}
    rows = {} if options.planned == "only" else dict(ROWS)
    rows |= {} if options.planned == "not" else _planned(options, most)
    part, parts = map(int, options.part.split("/"))
    rows = dict(list(rows.items())[part - 1 :: parts])
    done = proven_before(options.keep) if options.go_on else set()
    return {name: row for name, row in rows.items() if name not in done}


def _planned(options: argparse.Namespace, most: int) -> dict[str, Row]:
    if not options.prepared:
        return proposals(options.device, most)
    layouts = json.loads((options.prepared / PROPOSALS).read_text())
    return {name: Row(Layout.model_validate_json(text)) for name, text in layouts.items()}


def _prepare(options: argparse.Namespace) -> int:
    """Make what a machine without a planner takes: builds of all models, and the planner's proposals."""
    Models(options.prepare, options.device, options.dtype).of(ROWS.values())
    planned = proposals(options.device, options.processes or MOST_PROCESSES)
    layouts = {name: row.layout.model_dump_json() for name, row in planned.items()}
    (options.prepare / PROPOSALS).write_text(json.dumps(layouts, indent=1) + "\n")
    print(f"{options.prepare}: builds of all models, {len(planned)} layouts that the planner proposes")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except Fatal as error:
        sys.exit(f"parity: {error}")
