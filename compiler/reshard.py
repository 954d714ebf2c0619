"""From one training stage to the next: the state goes through storage, and is read in the next layout.

What the runtime does (runtime/programme.py, runtime/checkpoint.py): the last save of a stage is waited for
and read back for its checksums, the next stage's ranks verify it and read their own parts. torch's DCP
reads every saved shard whole that overlaps the wanted one, so that layouts which cut a tensor differently
read parts of it more than once; replicas read each for themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate_states import Bytes, element_bytes
from shipway.compiler.frozen import frozen
from shipway.compiler.held import Degrees, Held, held
from shipway.compiler.operators.base import Parameter
from shipway.compiler.workload import Workload
from shipway.schemas.cluster import Cluster
from shipway.schemas.layout import Layout
from shipway.schemas.training import Muon, Training

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

REBUILD_SECONDS = 60.0
"""Assumed: mesh, communicators, model, kernels' first launches, in processes that go on."""
RESTART_SECONDS = 300.0
"""Assumed: the same in a new job, with containers and imports; waiting for the scheduler not counted."""
DIMENSIONS = 3
"""Of the largest parameter, a stack of experts."""


@frozen
class Resharding:
    """What one change of stage takes."""

    state_bytes: int
    """Weights and optimizer state of the whole model, each once."""
    read_bytes: int
    """What all ranks of the next stage read of it together, overlaps and replicas counted."""
    write_seconds: float
    read_seconds: float
    """Checksums, verification and loading."""
    restart_seconds: float
    new_job: bool
    """Whether the next stage runs on another number of devices, and so in another job."""
    waiting: tuple[int, int]
    """Devices of the stage that ends, which write, and of the one that begins, which read."""

    @property
    def seconds(self) -> float:
        """All of it, during which nothing is trained."""
        return self.write_seconds + self.read_seconds + self.restart_seconds

    @property
    def device_seconds(self) -> float:
        """Seconds times the devices that wait."""
        before, after = self.waiting
        return before * self.write_seconds + after * (self.read_seconds + self.restart_seconds)


@frozen
class StateTensor:
    """A kind of parameter, and what all of its kind take in a checkpoint."""

    parameter: Parameter
    bytes: int


def state_tensors(work: Workload, training: Training) -> tuple[StateTensor, ...]:
    """Everything that a checkpoint holds, by kind of parameter."""
    sizes, is_muon = element_bytes(training), isinstance(training.optimizer, Muon)
    totals: dict[tuple[object, ...], tuple[Parameter, int]] = {}
    for row, repeats in zip(work.rows, work.totals.tolist(), strict=True):
        for p in row.parameters():
            key = (p.shape, p.sharding, p.optimizer, p.fp32)
            each = p.count * _bytes_of(p, sizes, is_muon)
            totals[key] = p, totals.get(key, (p, 0))[1] + each * repeats
    return tuple(StateTensor(p, size) for p, size in totals.values())


def _bytes_of(parameter: Parameter, sizes: Bytes, is_muon: bool) -> int:
    """Bytes of an element with its optimizer state."""
    weight = 4 if parameter.fp32 else sizes.weight
    if parameter.optimizer == "none":
        return weight
    moments = 1 if is_muon and parameter.optimizer == "muon" else 2
    return weight + moments * sizes.moment


@frozen(eq=False)
class Changes:
    """What going from each layout of one stage to each of the next takes; arrays are [before, after]."""

    state_bytes: int
    read_bytes: Floats
    write_seconds: float
    read_seconds: Floats
    restart_seconds: Floats
    waiting: tuple[Ints, Ints]
    """Devices of each layout before, [before], and after, [after]."""

    @property
    def seconds(self) -> Floats:
        """As `Resharding.seconds`."""
        return self.write_seconds + self.read_seconds + self.restart_seconds

    @property
    def device_seconds(self) -> Floats:
        """As `Resharding.device_seconds`."""
        before, after = self.waiting
        reading: Floats = after * (self.read_seconds + self.restart_seconds)
        return before[:, None] * self.write_seconds + reading

    def between(self, before: int, after: int) -> Resharding:
        """One of them."""
        devices = int(self.waiting[0][before]), int(self.waiting[1][after])
        return Resharding(
            state_bytes=self.state_bytes,
            read_bytes=round(float(self.read_bytes[before, after])),
            write_seconds=self.write_seconds,
            read_seconds=float(self.read_seconds[before, after]),
            restart_seconds=float(self.restart_seconds[before, after]),
            new_job=devices[0] != devices[1],
            waiting=devices,
        )


def reshardings(
    tensors: Sequence[StateTensor], cluster: Cluster, stages: Sequence[Sequence[Layout]]
) -> list[Changes]:
    """From each layout of each stage to each of the stage after it."""
    state, storage = sum(tensor.bytes for tensor in tensors), cluster.storage
    devices = [np.array([layout.world_size for layout in layouts]) for layouts in stages]
    cut = _all_shards(tensors, stages)
    result = []
    for number, layouts in enumerate(stages[1:], start=1):
        before, after = number - 1, number
        replicas = np.array([readers(layout) for layout in layouts])
        read = _read_bytes(tensors, cut[before], cut[after]) * replicas
        new_job = devices[before][:, None] != devices[after]
        result.append(
            Changes(
                state_bytes=state,
                read_bytes=read,
                write_seconds=state / storage.write_bandwidth,
                read_seconds=(2 * state + read) / storage.read_bandwidth,
                restart_seconds=np.where(new_job, RESTART_SECONDS, REBUILD_SECONDS),
                waiting=(devices[before], devices[after]),
            )
        )
    return result


def _read_bytes(tensors: Sequence[StateTensor], saved: Ints, wanted: Ints) -> Floats:
    """What one replica's ranks read together, [before, after].

    Where a dimension goes from a shards to b, they overlap in a + b - gcd(a, b) places, at each of which a
    whole saved shard is read.
    """
    total = np.zeros((saved.shape[1], wanted.shape[1]))
    for tensor, mine, others in zip(tensors, saved, wanted, strict=True):
        old, new = mine[:, None, :], others[None, :, :]
        repeats = (old + new - np.gcd(old, new)) / old
        total += tensor.bytes * repeats.prod(axis=2)
    return total


def _all_shards(tensors: Sequence[StateTensor], stages: Sequence[Sequence[Layout]]) -> list[Ints]:
    """Shards along each dimension, [tensors, layouts, dimensions] of each stage.

    Many layouts divide a parameter alike: only the degrees of its own kind count.
    """
    degrees = [[degrees_of(layout) for layout in layouts] for layouts in stages]
    every = tuple(dict.fromkeys(one for own in degrees for one in own))
    place = {one: number for number, one in enumerate(every)}
    cut = np.array([_shards_of_each(tensor.parameter, every) for tensor in tensors])
    return [cut[:, [place[one] for one in own]] for own in degrees]


def _shards_of_each(parameter: Parameter, degrees: Sequence[Degrees]) -> list[tuple[int, ...]]:
    known: dict[tuple[int, int], tuple[int, ...]] = {}
    result = []
    for one in degrees:
        own = (one.expert, one.expert_shard) if parameter.sharding == "expert" else (one.tensor, one.dense)
        if own not in known:
            known[own] = shards(parameter, one)
        result.append(known[own])
    return result


def readers(layout: Layout) -> int:
    """Replicas that read the same state."""
    return layout.data_parallel_replicate


def degrees_of(layout: Layout) -> Degrees:
    """Ranks that a layout divides parameters over."""
    return Degrees(
        layout.tensor_parallel,
        layout.expert_parallel,
        layout.data_parallel_shard * layout.context_parallel,
        layout.expert_shard,
    )


def shards(parameter: Parameter, degrees: Degrees) -> tuple[int, ...]:
    """Shards along each dimension of a parameter, filled up with ones."""
    mine = held(parameter, degrees)
    if mine is None:
        raise ValueError(f"{parameter.name} cannot be shared by {degrees}")
    counts = _counts(mine)
    return (*counts, *[1] * (DIMENSIONS - len(counts)))


def _counts(mine: Held) -> tuple[int, ...]:
    shape = mine.parameter.shape
    split = [whole // local for whole, local in zip(shape, mine.local, strict=True)]
    split[mine.dimension] *= min(mine.ranks, mine.local[mine.dimension])
    return tuple(split)
