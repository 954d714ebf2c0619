"""What a run ran on, for its report."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch
import torch.distributed as dist

from shipway.runtime.kernels import table
from shipway.schemas.training import Compilation


def describe_environment(
    device: torch.device, compilation: Compilation = "auto", *, fp8: bool = False
) -> dict[str, str]:
    """Host, device, versions, and which implementation serves each kernel."""
    found = {
        "host": platform.node(),
        "ranks": str(dist.get_world_size()),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else _processor(),
        "process groups": dist.get_backend(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads of a rank": str(torch.get_num_threads()),
    }
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["allocator"] = os.environ.get("PYTORCH_ALLOC_CONF", "default")
    kernels: dict[str, list[str]] = {}
    for choice in table(device.type, compilation, fp8=fp8):
        kernels.setdefault(choice.implementation, []).append(choice.operation)
    return found | {f"kernels: {name}": ", ".join(operations) for name, operations in kernels.items()}


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]} x {len(names)}" if names else platform.processor() or "CPU"
