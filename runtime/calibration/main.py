"""`python -m shipway.runtime.calibration.main`: measure this machine and write the rows as JSON.

One process measures one device; under torchrun the collectives between all of its ranks are
measured too, and rank 0 writes.
"""

from __future__ import annotations

import argparse
import datetime
import os
import sys
from collections.abc import Collection
from pathlib import Path

import torch
import torch.distributed as dist

from shipway.runtime.calibration.collectives import measure_collectives
from shipway.runtime.calibration.operations import FAMILIES, FULL, QUICK, Sizes
from shipway.runtime.kernels import dispatch
from shipway.schemas.measurement import Environment, Measurements, Row
from shipway.schemas.plan import canonical_json


def main(arguments: list[str] | None = None) -> int:
    """Measure and write; returns the exit code."""
    parser = argparse.ArgumentParser(description="Measure this machine's operations.")
    parser.add_argument("--out", type=Path, required=True, help="file to write")
    parser.add_argument("--name", default=None, help="name of the calibration")
    parser.add_argument("--quick", action="store_true", help="few small sizes")
    families = (*FAMILIES, "collectives")
    parser.add_argument("--only", action="append", choices=families, help="measure this; may be repeated")
    options = parser.parse_args(arguments)
    wanted = options.only or families
    device = _device()
    distributed = int(os.environ.get("WORLD_SIZE", "1")) > 1
    if distributed:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    first = not distributed or dist.get_rank() == 0
    sizes = FULL if device.type == "cuda" and not options.quick else QUICK
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    rows = []
    if first:
        rows += _single(device, sizes, dtype, wanted)
    if distributed and "collectives" in wanted:
        dist.barrier()
        bits = range(12, 31, 2) if sizes is FULL else range(12, 21, 4)
        for row in measure_collectives(device, tuple(1 << b for b in bits)):
            if first:
                print(_line(row), file=sys.stderr)
            rows.append(row)
    if first:
        result = Measurements(
            name=options.name or options.out.stem,
            environment=_environment(device, arguments),
            memory_bytes=torch.cuda.mem_get_info()[1] if device.type == "cuda" else 0,
            context_bytes=_context_bytes(device),
            rows=tuple(rows),
        )
        options.out.write_text(canonical_json(result))
        print(f"{len(rows)} rows written to {options.out}", file=sys.stderr)
    if distributed:
        dist.destroy_process_group()
    return 0


def _single(device: torch.device, sizes: Sizes, dtype: torch.dtype, wanted: Collection[str]) -> list[Row]:
    """Rows of one device; what cannot be measured here is told, and keeps its default in a calibration."""
    rows = []
    for family in (name for name in FAMILIES if name in wanted):
        try:
            for row in FAMILIES[family](device, sizes, dtype):
                print(_line(row), file=sys.stderr)
                rows.append(row)
        except (RuntimeError, NotImplementedError) as error:
            print(f"{family} could not be measured whole: {error}", file=sys.stderr)
    return rows


def _device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _context_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free - torch.cuda.memory_reserved()


def _environment(device: torch.device, arguments: list[str] | None) -> Environment:
    cuda = device.type == "cuda"
    return Environment(
        device=torch.cuda.get_device_name(device) if cuda else "cpu",
        devices=dist.get_world_size() if dist.is_initialized() else 1,
        torch=torch.__version__,
        cuda=torch.version.cuda if cuda else None,
        kernels={choice.operation: choice.implementation for choice in dispatch.table()},
        date=datetime.date.today().isoformat(),
        command="python -m shipway.runtime.calibration.main " + " ".join(arguments or sys.argv[1:]),
    )


def _line(row: Row) -> str:
    rate = f"{row.flops / row.seconds / 1e12:7.1f} TFLOP/s" if row.flops else ""
    rate = rate or (f"{row.bytes / row.seconds / 1e9:7.1f} GB/s" if row.bytes else "")
    return f"{row.operation:16s} {row.phase:8s} {row.sizes!s:90s} {row.seconds * 1e6:12.1f} us {rate}"


if __name__ == "__main__":
    sys.exit(main())
