"""What this machine has, for `shipway doctor`; nothing here fails, it only reports."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

from shipway.compiler.forked import cores
from shipway.compiler.frozen import frozen

GIB = 2**30
LEAST_FREE_BYTES = 5 * GIB
"""Below this even the demo's checkpoints may not find room."""

LAUNCHERS = {
    "torchrun": "local target",
    "sbatch": "Slurm target",
    "kubectl": "Kubernetes target",
    "ssh": "ssh target",
}


@frozen
class Finding:
    """One line of the table."""

    topic: str
    state: Literal["ok", "note", "problem"]
    detail: str


def findings() -> list[Finding]:
    """Everything, in the order that problems are best solved."""
    return [*_python(), *_torch(), *_kernels(), *_launchers(), *_disk()]


def _python() -> Iterator[Finding]:
    good = sys.version_info >= (3, 11)
    yield Finding(
        "python",
        "ok" if good else "problem",
        f"{platform.python_version()} on {platform.platform(terse=True)}",
    )
    for name in ("hydra-core", "pydantic", "numpy"):
        try:
            yield Finding(name, "ok", version(name))
        except PackageNotFoundError:
            yield Finding(name, "problem", "not installed: pip install shipway")


def _torch() -> Iterator[Finding]:
    try:
        import torch
    except (ImportError, OSError) as error:
        yield Finding("torch", "problem", f"cannot be imported: {error}. Planning works, training does not")
        return
    yield Finding("torch", "ok", f"{torch.__version__}, CUDA {torch.version.cuda or 'not built in'}")
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            yield _device(torch, index)
    else:
        yield Finding("devices", "note", f"no GPU that torch can use; {cores()} CPU cores")


def _device(torch: Any, index: int) -> Finding:
    topic = f"device {index}"
    try:
        free, total = torch.cuda.mem_get_info(index)
        name = torch.cuda.get_device_name(index)
    except RuntimeError as error:
        return Finding(topic, "problem", str(error).splitlines()[0])
    used = total - free
    busy = used > 2 * GIB
    detail = f"{name}, {total / GIB:.1f} GiB" + (f", {used / GIB:.1f} GiB of it in use" if busy else "")
    return Finding(topic, "note" if busy else "ok", detail)


def _kernels() -> Iterator[Finding]:
    try:
        from importlib import import_module

        table = import_module("shipway.runtime.kernels.dispatch").table
        choices = table()
    except ImportError as error:
        yield Finding("kernels", "note", f"not known: {error}")
        return
    for choice in choices:
        yield Finding(f"kernel {choice.operation}", "ok", f"{choice.implementation} ({choice.reason})")


def _launchers() -> Iterator[Finding]:
    beside_python = Path(sys.executable).parent
    for name, purpose in LAUNCHERS.items():
        path = shutil.which(name) or shutil.which(name, path=str(beside_python))
        needed = name == "torchrun"
        state: Literal["ok", "note", "problem"] = "ok" if path else "problem" if needed else "note"
        yield Finding(name, state, path or f"not found: needed by the {purpose} only")


def _disk() -> Iterator[Finding]:
    here = Path.cwd()
    usage = shutil.disk_usage(here)
    enough = usage.free >= LEAST_FREE_BYTES
    detail = f"{usage.free / GIB:.1f} GiB free of {usage.total / GIB:.1f} in {here}"
    yield Finding("disk", "ok" if enough else "note", detail)
    if not os.access(here, os.W_OK):
        yield Finding("folder", "problem", f"{here} cannot be written: build/ and runs/ go there")
    shared = Path("/dev/shm")
    if shared.is_dir():
        free = shutil.disk_usage(shared).free
        detail = f"{free / GIB:.1f} GiB free in {shared}"
        yield Finding("shared memory", "ok" if free >= GIB else "note", detail)
