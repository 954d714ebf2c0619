"""Every so many steps: each expert's hits, each layer's activations and gradients, each rank's speed.

What a step's line in metrics.jsonl has no room for. Collected over all ranks through the host group,
so that a pipeline's last stage is seen as well as its first.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from shipway.runtime.parallel.data import all_layers
from shipway.runtime.routing import ExpertLoads
from shipway.runtime.shards import local_tensor, sharded_axes
from shipway.runtime.stage import StageRun
from shipway.runtime.trainer import Trainer

OUTSIDE_LAYERS = "outside layers"
"""Embedding, final norm, head, vision tower."""
PROBE_SIZE = {"cpu": 256, "cuda": 4096}
"""Rows and columns of the matrix product that every rank times: milliseconds on the device."""
PROBE_REPEATS = 5


@dataclass(frozen=True)
class Details:
    """One record."""

    expert_hits: Mapping[str, Sequence[int]]
    """Tokens that chose each expert in the step, over all ranks, by layer."""
    activation_rms: Mapping[str, float]
    """Root mean square of each layer's output over the step's last micro-batch; the largest of all ranks."""
    gradient_norm: Mapping[str, float]
    """L2 norm of each layer's gradient, before clipping."""
    probe_seconds: Mapping[str, float]
    """Smallest, median and largest time that ranks take for one and the same matrix product."""
    data_wait_seconds: Mapping[str, float]
    """Median and largest over ranks, since the last record."""
    utilisation: Mapping[str, float] | None
    """Smallest and median share of time that devices were busy, as the driver samples it; None on CPUs."""
    slow_ranks: Sequence[Mapping[str, Any]]
    """Ranks that were slow in this record and the one before: rank, host, times the median."""


@dataclass
class DetailWatch:
    """Collects details of a stage's steps when they are due; all ranks must use it alike."""

    run: StageRun
    due: bool = False
    _activations: dict[str, Tensor] = field(default_factory=dict)
    _gradients: dict[str, Tensor] = field(default_factory=dict)
    _waited: float = 0.0
    _suspects: frozenset[int] = frozenset()

    def __post_init__(self) -> None:
        self._every = self.run.context.plan.blueprint.training.observability.details_every_steps
        self.run.trainer.on_gradients = self._take_gradients
        for part in self.run.trainer.model.parts:
            for name, layer in all_layers(part).items():
                layer.register_forward_hook(lambda module, inputs, output, name=name: self._see(name, output))

    def begin(self) -> None:
        """A step begins."""
        self.due = (self.run.position.step + 1) % self._every == 0

    def end(self, loads: ExpertLoads) -> Details | None:
        """The step has ended: its record, on rank 0, when one was due. `loads` are of this rank's layers."""
        if not self.due:
            return None
        self.due = False
        context = self.run.context
        factor = context.plan.blueprint.training.observability.slow_rank_factor
        waited = self.run.loader.data_wait_seconds
        mine = {
            "hits": {name: load.tolist() for name, load in loads.items()} if self._is_first else {},
            "activations": {name: float(value) for name, value in self._activations.items()},
            "gradients": {name: float(value) for name, value in self._gradients.items()},
            "probe": probe_seconds(context.device),
            "waited": waited - self._waited,
            "busy": utilisation(context.device),
            "host": socket.gethostname(),
        }
        self._waited = waited
        self._activations.clear()
        self._gradients.clear()
        everyone: list[dict[str, Any]] | None = [{}] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(mine, everyone, dst=0, group=context.groups.control)
        if everyone is None:
            return None
        slow = slow_ranks([rank["probe"] for rank in everyone], factor)
        lasting = [rank for rank in slow if rank in self._suspects]
        self._suspects = frozenset(slow)
        return put_together(everyone, {rank: slow[rank] for rank in lasting})

    @property
    def _is_first(self) -> bool:
        """Whether this rank speaks for its pipeline stage: all its ranks know the same loads."""
        mesh = self.run.mesh
        return not any(mesh.rank(axis) for axis in ("dp_replicate", "dp_shard", "cp", "tp"))

    def _see(self, name: str, output: object) -> None:
        if self.due:
            with torch.no_grad():
                self._activations[name] = _hidden(output).detach().float().square().mean().sqrt()

    def _take_gradients(self, trainer: Trainer) -> None:
        if self.due:
            self._gradients = layer_squares(trainer)


def _hidden(output: object) -> Tensor:
    """The hidden state among what a layer returns: with attention residuals its sources come with it."""
    while isinstance(output, (tuple, list)):
        output = output[-1]
    assert isinstance(output, Tensor)
    return local_tensor(output)


@torch.no_grad()
def layer_squares(trainer: Trainer) -> dict[str, Tensor]:
    """This rank's part of the squared gradient norm of each layer: over all ranks they add up to it.

    A block that several ranks hold alike counts on each by its share of their number.
    """
    model = trainer.model
    ranks = dist.get_world_size() // model.mesh.size("pp")
    squares: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters().items():
        if parameter.grad is None:
            continue
        holders = 1
        for axis in sharded_axes(parameter):
            holders *= parameter.device_mesh.size(axis)  # type: ignore[attr-defined]
        square = local_tensor(parameter.grad).float().square().sum() * (holders / ranks)
        layer = layer_of(name)
        squares[layer] = squares[layer] + square if layer in squares else square
    return squares


def layer_of(parameter: str) -> str:
    """Layer of a parameter, as expert loads name it."""
    first, _, rest = parameter.partition(".")
    if first == "layers":
        return rest.split(".", 1)[0]
    if first == "prediction":
        return f"prediction.{rest.split('.', 1)[0]}"
    return OUTSIDE_LAYERS


def put_together(everyone: Sequence[Mapping[str, Any]], slow: Mapping[int, float]) -> Details:
    """One record from what all ranks know."""
    hits: dict[str, Sequence[int]] = {}
    activations: dict[str, float] = {}
    squares: dict[str, float] = {}
    for rank in everyone:
        hits |= rank["hits"]
        for name, value in rank["activations"].items():
            activations[name] = max(value, activations.get(name, 0.0))
        for name, value in rank["gradients"].items():
            squares[name] = squares.get(name, 0.0) + value
    probes, waits = [rank["probe"] for rank in everyone], [rank["waited"] for rank in everyone]
    busy = [rank["busy"] for rank in everyone if rank["busy"] is not None]
    return Details(
        expert_hits=hits,
        activation_rms=activations,
        gradient_norm={name: square**0.5 for name, square in squares.items()},
        probe_seconds={"least": min(probes), "median": statistics.median(probes), "most": max(probes)},
        data_wait_seconds={"median": statistics.median(waits), "most": max(waits)},
        utilisation={"least": min(busy), "median": statistics.median(busy)} if busy else None,
        slow_ranks=[
            {"rank": rank, "host": everyone[rank]["host"], "times_median": times}
            for rank, times in slow.items()
        ],
    )


def slow_ranks(seconds: Sequence[float], factor: float) -> dict[int, float]:
    """Ranks that take more than `factor` times the median, and how many times they take it."""
    median = statistics.median(seconds)
    return {rank: s / median for rank, s in enumerate(seconds) if median > 0 and s > factor * median}


def probe_seconds(device: torch.device) -> float:
    """Least time of a few equal matrix products on this rank alone: no other rank can make it longer.

    A step takes all ranks equally long, for the fast ones wait for the slow; this tells them apart.
    """
    size = PROBE_SIZE[device.type]
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    matrix = torch.ones(size, size, device=device, dtype=dtype)
    times = []
    for _ in range(PROBE_REPEATS):
        _synchronize(device)
        began = time.perf_counter()
        matrix @ matrix
        _synchronize(device)
        times.append(time.perf_counter() - began)
    return min(times)


def utilisation(device: torch.device) -> float | None:
    """Share of the last sample that the device was busy, 0 to 1; None where no driver says it."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # no nvidia-ml-py, or whatever a driver raises: a figure is not worth a run
        return None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def describe_slow(details: Details) -> list[str]:
    """What to tell a person, one line a rank."""
    return [
        f"slow device: rank {entry['rank']} on {entry['host']} takes {entry['times_median']:.2f} times the"
        " median for the same matrix product, twice in a row; the other ranks wait for it in every step"
        for entry in details.slow_ranks
    ]
