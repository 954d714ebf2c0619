"""What is written at every step: one JSON line and the same scalars for TensorBoard."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from shipway.runtime.run_folder import replace_text


@dataclass(frozen=True)
class StepMetrics:
    """One step, as it went and as it was planned."""

    stage: str
    step: int
    """Optimizer steps since the programme began, this one included."""
    stage_step: int
    """Optimizer steps since the stage began, this one included."""
    stage_steps: int
    loss: float
    learning_rate: float
    gradient_norm: float
    finite: bool
    """Whether the update was made."""
    tokens: int
    """Tokens read since the programme began, over the whole cluster."""
    step_seconds: float
    planned_step_seconds: float
    tokens_per_second: float
    planned_tokens_per_second: float
    mfu: float
    """Model FLOPs per second over the devices' peak at the compute precision."""
    planned_mfu: float
    data_wait_seconds: float
    """Time this step's rank 0 waited for data."""
    memory_allocated_bytes: int | None
    """Peak of the worst rank; None where the device does not count memory."""
    memory_reserved_bytes: int | None
    planned_memory_allocated_bytes: int
    planned_memory_reserved_bytes: int
    stream_hash: str | None
    """Running hash over all tokens of all ranks."""
    expert_load: dict[str, float]
    """Largest over mean load of each layer's experts."""


@dataclass
class MetricsWriter:
    """Appends to metrics.jsonl and TensorBoard; made on rank 0 only."""

    path: Path
    tensorboard_folder: Path
    _board: Any = field(init=False)

    def __post_init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only writers need it

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._board = SummaryWriter(str(self.tensorboard_folder))

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(metrics), allow_nan=True) + "\n")
        for name, value in _scalars(metrics).items():
            self._board.add_scalar(name, value, metrics.step)

    def write_evaluation(self, stage: str, step: int, measures: Mapping[str, float]) -> None:
        """Append what an evaluation found."""
        with self.path.open("a") as file:
            line = {"event": "evaluation", "stage": stage, "step": step, "measures": dict(measures)}
            file.write(json.dumps(line) + "\n")
        for name, value in measures.items():
            self._board.add_scalar(f"evaluation/{name}", value, step)

    def close(self) -> None:
        """Flush TensorBoard."""
        self._board.close()


def _scalars(metrics: StepMetrics) -> dict[str, float]:
    scalars = {
        "train/loss": metrics.loss,
        "train/learning_rate": metrics.learning_rate,
        "train/gradient_norm": metrics.gradient_norm,
        "speed/tokens_per_second": metrics.tokens_per_second,
        "speed/tokens_per_second_planned": metrics.planned_tokens_per_second,
        "speed/step_seconds": metrics.step_seconds,
        "speed/step_seconds_planned": metrics.planned_step_seconds,
        "speed/mfu": metrics.mfu,
        "speed/data_wait_seconds": metrics.data_wait_seconds,
    }
    if metrics.memory_allocated_bytes is not None:
        scalars["memory/allocated_bytes"] = metrics.memory_allocated_bytes
        scalars["memory/allocated_bytes_planned"] = metrics.planned_memory_allocated_bytes
    return scalars | {f"expert_load/layer_{name}": load for name, load in metrics.expert_load.items()}


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All lines of a metrics file; a line cut short by a crash is left out."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_text().splitlines():
        try:
            lines.append(json.loads(line))
        except ValueError:
            continue
    return lines


def rewind(path: Path, step: int) -> None:
    """Drop lines of steps after `step`: a run that resumes there will write them again."""
    lines = read_metrics(path)
    kept = [line for line in lines if line["step"] <= step]
    if len(kept) != len(lines):
        replace_text(path, "".join(json.dumps(line) + "\n" for line in kept))
