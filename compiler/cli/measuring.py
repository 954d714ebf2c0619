"""Runs the runtime's verification on builds, as many at once as this machine has devices for."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from shipway.compiler.frozen import frozen
from shipway.compiler.launch.devices import devices_here
from shipway.schemas.layout import Layout
from shipway.schemas.verification import StageReading

LAST_LINES = 12
"""Of what a process that failed without a word printed."""


@frozen
class Job:
    """Builds that all run on `world` devices."""

    builds: tuple[Path, ...]
    world: int
    gpus: tuple[str, ...]
    """Of this machine; none for builds that train on a CPU."""
    stage: str | None
    steps: int
    documents: bool
    holders: bool = False
    """Whether to tell which lines of code hold the memory at the peak."""


def gpus_here(kind: str) -> tuple[str, ...]:
    """GPUs that the environment allows, or else those that this machine's driver lists; none without one."""
    allowed = os.environ.get("CUDA_VISIBLE_DEVICES")
    if allowed is not None:
        return tuple(name for name in allowed.split(",") if name.strip())
    return tuple(map(str, range(len(devices_here(kind)))))


def measure(job: Job, folder: Path, tell: Callable[[StageReading], None]) -> None:
    """Measure every build, and tell each reading as soon as it is known; logs are left in `folder`."""
    slots = max(1, len(job.gpus) // job.world)
    shares = [job.builds[slot::slots] for slot in range(min(slots, len(job.builds)))]
    with ThreadPoolExecutor(len(shares)) as pool:
        list(pool.map(lambda slot: _measure_share(job, slot, shares[slot], folder, tell), range(len(shares))))


def _measure_share(
    job: Job, slot: int, builds: Sequence[Path], folder: Path, tell: Callable[[StageReading], None]
) -> None:
    """One build after the other in one set of processes; what follows a failure gets a new set."""
    found: set[Path] = set()
    out, log = folder / f"readings-{slot}.jsonl", folder / f"log-{slot}.txt"
    while left := [build for build in builds if build not in found]:
        seen = len(found)
        with log.open("a", encoding="utf-8") as file:
            process = subprocess.Popen(
                _command(job, left, out), env=_environment(job, slot), stdout=file, stderr=file
            )
            while True:
                ended = _ends_soon(process)
                for reading in _readings(out):
                    if Path(reading.build) not in found:
                        found.add(Path(reading.build))
                        tell(reading)
                if ended:
                    break
        if len(found) == seen:
            found.add(left[0])
            tell(_lost(left[0], process.returncode, log))


def _ends_soon(process: subprocess.Popen[bytes]) -> bool:
    try:
        process.wait(timeout=1)
    except subprocess.TimeoutExpired:
        return False
    return True


def _command(job: Job, builds: Sequence[Path], out: Path) -> list[str]:
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={job.world}"]
    command = [sys.executable, *(several if job.world > 1 else []), "-m", "shipway.runtime.verification.main"]
    command += [*(str(build) for build in builds), "--out", str(out), "--steps", str(job.steps)]
    command += ["--device", "cuda" if job.gpus else "cpu"]
    command += ["--stage", job.stage] if job.stage else []
    command += ["--holders"] if job.holders else []
    return command + (["--documents"] if job.documents else [])


def _environment(job: Job, slot: int) -> dict[str, str]:
    """As a launch sets it; each slot sees its own devices."""
    environment = dict(os.environ)
    environment.setdefault("OMP_NUM_THREADS", "1")
    if job.gpus:
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        own = job.gpus[slot * job.world : (slot + 1) * job.world]
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(own)
    return environment


def _readings(out: Path) -> list[StageReading]:
    if not out.exists():
        return []
    lines = out.read_text(encoding="utf-8").splitlines(keepends=True)
    return [StageReading.model_validate_json(line) for line in lines if line.endswith("\n")]


def _lost(build: Path, code: int, log: Path) -> StageReading:
    last = " | ".join(log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
    return StageReading(
        build=str(build),
        plan_hash="",
        stage="",
        layout=Layout(),
        outcome="failed",
        detail=f"the process ended with code {code}: {last}",
    )
