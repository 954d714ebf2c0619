"""What all stages of a run share, and where the run stands."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import torch

from shipway.runtime.checkpoint import Checkpointer
from shipway.runtime.distributed import HostGroups
from shipway.runtime.mesh import MeshPool
from shipway.runtime.metrics import MetricsWriter
from shipway.runtime.progress import Display
from shipway.runtime.run_folder import RunFolder
from shipway.runtime.signals import StopRequest
from shipway.runtime.watchdog import Watchdog
from shipway.schemas.plan import Plan


@dataclass(frozen=True)
class Position:
    """Where the programme stands, between two optimizer steps."""

    stage: str = ""
    stage_step: int = 0
    step: int = 0
    """Optimizer steps since the programme began."""
    tokens: int = 0
    """Tokens read since the programme began."""


@dataclass(frozen=True)
class Context:
    """What all stages share."""

    plan: Plan
    module: ModuleType
    """The generated model."""
    build: Path
    run: RunFolder
    device: torch.device
    meshes: MeshPool
    groups: HostGroups
    checkpointer: Checkpointer
    stop: StopRequest
    display: Display
    watchdog: Watchdog
    metrics: MetricsWriter | None
    """On rank 0 only."""
