"""Accelerators of this machine as the driver names them, found without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from shipway.compiler.launch.job import Programme
from shipway.schemas.cluster import Device
from shipway.schemas.diagnostics import Diagnostic

KFD = Path("/sys/class/kfd/kfd/topology/nodes")
CPU = "cpu"
"""How a machine without any is named, as torch does."""
QUERY = ("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")


def devices_here(kind: str) -> list[str]:
    """Names of the devices of a software family; empty where there is no driver."""
    if kind == "rocm":
        return ["AMD GPU" for path in sorted(KFD.glob("*/gpu_id")) if path.read_text().strip() != "0"]
    if shutil.which(QUERY[0]) is None:
        return []
    answer = subprocess.run(QUERY, capture_output=True, text=True, check=False)
    names = [line.strip() for line in answer.stdout.splitlines() if line.strip()]
    return names if answer.returncode == 0 else []


def is_named(device: Device, name: str) -> bool:
    """Whether a device that names itself so is of this type; names of GPUs are only told apart under CUDA."""
    if device.kind == "cpu" or name == CPU:
        return device.kind == "cpu" and name == CPU
    return device.kind != "cuda" or device.answers_to(name)


def device_diagnostics(programme: Programme) -> list[Diagnostic]:
    """What of this machine's devices is not as the plan has it (LA021, LA022)."""
    device, needed = programme.cluster.device, programme.largest.processes_per_node
    if device.kind == "cpu":
        return []
    names = devices_here(device.kind)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    count = len(names) if visible is None else min(len(names), len([v for v in visible.split(",") if v]))
    if count < needed:
        found = f"there {'is' if count == 1 else 'are'} {count or 'none'}"
        hidden = (f"CUDA_VISIBLE_DEVICES is {visible!r}",) if visible is not None else ()
        return [
            Diagnostic(
                code="LA021",
                summary=f"the plan needs {needed} {device.name} on this machine, and {found}",
                field="cluster.target.kind",
                because=hidden,
                legal=("slurm", "kubernetes", "aihc", "ssh"),
                help="launch it where the devices are, name the cluster's target, or plan for this machine",
            )
        ]
    strange = sorted({name for name in names if not is_named(device, name)})
    if not strange:
        return []
    return [
        Diagnostic(
            code="LA022",
            summary=f"the plan is for {device.name}, and this machine has {', '.join(strange)}",
            field="cluster.device",
            help="plan for the device that is here: its memory and speed decide the layout",
        )
    ]
