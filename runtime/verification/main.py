"""`python -m shipway.runtime.verification.main BUILD... --out FILE`: measure builds on the devices here.

Started by torchrun, or alone for builds of one device. Each stage measured is one line of JSON in FILE, as
soon as it is known; after a failure the process ends, as its peers could wait for ever, and whoever started
it starts it again with the builds that are left.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from shipway.runtime.build_folder import read_plan
from shipway.runtime.distributed import join, leave
from shipway.runtime.exit_codes import ExitCode, Fatal
from shipway.runtime.mesh import MeshPool
from shipway.runtime.verification.stage import forget, measure_stage
from shipway.schemas.layout import Layout
from shipway.schemas.verification import Outcome, StageReading

STUCK_SECONDS = 240.0
"""After which every thread's stack is printed, once."""


def main(arguments: Sequence[str] | None = None) -> ExitCode:
    """Measure every build that is named; DONE when all were."""
    options = _parser().parse_args(arguments)
    device = join(options.device)
    meshes = MeshPool(device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    for build in options.builds:
        faulthandler.dump_traceback_later(STUCK_SECONDS)
        try:
            reading = measure_stage(
                build, options.stage, device, meshes, options.steps, options.documents, options.holders
            )
        except Exception as error:
            _write(options.out, _failure(build, options.stage, error))
            return ExitCode.FATAL
        if dist.get_rank() == 0:
            _write(options.out, reading)
        forget(device)
    faulthandler.cancel_dump_traceback_later()
    leave()
    return ExitCode.DONE


def _failure(build: Path, stage: str | None, error: Exception) -> StageReading:
    """What is known of a build that could not be measured; every rank that fails writes one."""
    out_of_memory = isinstance(error, torch.OutOfMemoryError)
    outcome: Outcome = "out of memory" if out_of_memory else "failed"
    if not isinstance(error, (torch.OutOfMemoryError, Fatal)):
        traceback.print_exc()
    layout, plan_hash = Layout(), ""
    try:
        plan = read_plan(build)
        planned = next(s for s in plan.stages if stage in (None, s.name))
        layout, plan_hash, stage = planned.layout, plan.hash, planned.name
    except (Fatal, StopIteration):
        pass
    return StageReading(
        build=str(build),
        plan_hash=plan_hash,
        stage=stage or "",
        layout=layout,
        outcome=outcome,
        detail=f"rank {dist.get_rank()}: {(str(error) or type(error).__name__).splitlines()[0]}",
    )


def _write(out: Path, reading: StageReading) -> None:
    with out.open("a", encoding="utf-8") as file:
        file.write(reading.model_dump_json() + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shipway.runtime.verification.main", description=__doc__)
    parser.add_argument(
        "builds", type=Path, nargs="+", metavar="BUILD", help="folder that `shipway build` wrote"
    )
    parser.add_argument("--out", type=Path, required=True, help="file that readings are added to")
    parser.add_argument("--stage", help="stage to run; by default the first")
    parser.add_argument("--steps", type=int, default=5, help="steps to measure, after the warm-up")
    parser.add_argument("--documents", action="store_true", help="keep the data's document boundaries")
    parser.add_argument("--holders", action="store_true", help="tell what holds memory at the peak")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="by default cuda where there is one")
    return parser


if __name__ == "__main__":
    ended = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Threads that wait for peers which may be gone must not keep a failed process.
    os._exit(ended)
