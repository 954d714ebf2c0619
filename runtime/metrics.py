"""What is written at every step: one JSON line, and the same scalars for TensorBoard and who else listens."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

if TYPE_CHECKING:
    from shipway.runtime.details import Details
    from shipway.runtime.prometheus import Exporter
    from shipway.runtime.weights_and_biases import Reporter


DETAILS_FILE = "details.jsonl"
"""Beside the metrics: a record there may be a thousand times as long as a step's line."""


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
    """Model FLOPs per second over the devices' peak in bf16 (fp32 when computing in fp32)."""
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
    exporter: Exporter | None = None
    reporter: Reporter | None = None
    _board: Any = field(init=False)

    def __post_init__(self) -> None:
        from torch.utils.tensorboard import SummaryWriter  # slow to import, and only writers need it

        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._board = SummaryWriter(str(self.tensorboard_folder))

    def write(self, metrics: StepMetrics) -> None:
        """Append one step."""
        self._append(asdict(metrics))
        place = {
            "train/step": metrics.step,
            "train/stage_step": metrics.stage_step,
            "train/tokens": metrics.tokens,
        }
        self._pass_on(_scalars(metrics), metrics.step, besides=place)

    def write_details(self, stage: str, step: int, details: Details) -> None:
        """Append what was collected of a step."""
        self._append({"stage": stage, "step": step, **asdict(details)}, self.path.with_name(DETAILS_FILE))
        scalars = {
            f"{kind}/layer_{name}": value
            for kind, values in (
                ("activation_rms", details.activation_rms),
                ("gradient_norm", details.gradient_norm),
            )
            for name, value in values.items()
        }
        scalars |= {f"probe_seconds/{name}": value for name, value in details.probe_seconds.items()}
        scalars |= {f"data_wait_seconds/{name}": value for name, value in details.data_wait_seconds.items()}
        scalars |= {f"utilisation/{name}": value for name, value in (details.utilisation or {}).items()}
        self._pass_on(scalars, step)

    def write_profile(self, stage: str, step: int, summary: Mapping[str, Any]) -> None:
        """Append what a profile measured."""
        self._append({"event": "profile", "stage": stage, "step": step, **summary})
        seconds = summary["communication_seconds_per_step"]
        self._pass_on({f"communication_seconds/{axis}": s for axis, s in seconds.items()}, step)

    def write_evaluation(self, stage: str, step: int, measures: Mapping[str, float]) -> None:
        """Append what an evaluation found."""
        self._append({"event": "evaluation", "stage": stage, "step": step, "measures": dict(measures)})
        self._pass_on({f"evaluation/{name}": value for name, value in measures.items()}, step)

    def close(self) -> None:
        """Flush TensorBoard, and stop serving and sending."""
        self._board.close()
        if self.exporter:
            self.exporter.close()
        if self.reporter:
            self.reporter.close()

    def _append(self, line: Mapping[str, Any], path: Path | None = None) -> None:
        with (path or self.path).open("a") as file:
            file.write(json.dumps(line, allow_nan=True) + "\n")

    def _pass_on(
        self, scalars: Mapping[str, float], step: int, besides: Mapping[str, float] | None = None
    ) -> None:
        """To TensorBoard and whoever else listens."""
        for name, value in scalars.items():
            self._board.add_scalar(name, value, step)
        if self.exporter:
            self.exporter.set({**scalars, **(besides or {})})
        if self.reporter:
            self.reporter.log(scalars, step)


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
    """Drop lines of steps after `step`, of details too: a run that resumes there will write them again."""
    for each in (path, path.with_name(DETAILS_FILE)):
        if each.exists():
            os.truncate(each, _end_of(each, step))


def _end_of(path: Path, step: int) -> int:
    """Bytes up to the end of the last line of a step up to `step`; lines are in the order of steps.

    Found by bisection: a long run's file is not read. A line cut short by a crash is behind the end.
    """
    with path.open("rb") as file:
        low, high = 0, file.seek(0, 2)  # all before `low` is kept, nothing from `high` on
        while low < high:
            middle = (low + high) // 2
            start = _line_start(file, middle, low)
            file.seek(start)
            line = file.readline()
            if line.endswith(b"\n") and _step_of(line) <= step:
                low = start + len(line)
            else:
                high = start
        return low


def _line_start(file: BinaryIO, offset: int, least: int) -> int:
    """Where the line begins that holds the byte at `offset`; not before `least`."""
    block = 4096
    while offset > least:
        start = max(least, offset - block)
        file.seek(start)
        found = file.read(offset - start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        offset = start
    return least


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")
