"""Joining the job: device, default process group, and leaving in order."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

COLLECTIVE_TIMEOUT = timedelta(minutes=30)


def join(device_kind: str | None = None) -> torch.device:
    """Initialise the default process group from torchrun's environment and return this rank's device.

    NCCL on GPUs, gloo on CPU; `device_kind` forces one. Started without torchrun, this process is
    a world of its own.
    """
    if "RANK" not in os.environ:
        os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    kind = device_kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cpu":
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
        return torch.device("cpu")
    device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=COLLECTIVE_TIMEOUT)
    return device


@dataclass(frozen=True)
class HostGroups:
    """Process groups of all ranks over gloo, which outlive the stages."""

    control: dist.ProcessGroup
    """Flags and small objects that must not wait for the device."""
    checkpoint: dist.ProcessGroup
    """Used by the background writer alone, so that it cannot deadlock a step."""


def host_groups() -> HostGroups:
    """Create them; every rank must call it."""
    return HostGroups(dist.new_group(backend="gloo"), dist.new_group(backend="gloo"))


def leave() -> None:
    """Destroy all process groups; only when every rank gets here."""
    if dist.is_initialized():
        dist.destroy_process_group()


def free_port() -> int:
    """A TCP port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
