"""What one rank holds of each parameter: tensor and expert parallel split it first, FSDP shards the rest.

The rules are the runtime's (runtime/parallel/data.py): dimension 0 is shared and padded, but what tensor or
expert parallel has split along it already, and stacks of fewer experts than ranks, take a dimension that
divides evenly.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import Parameter

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@frozen
class Degrees:
    """Ranks that parameters are divided over."""

    tensor: int = 1
    expert: int = 1
    dense: int = 1
    """Ranks that FSDP shards all but routed experts over: dp_shard x cp."""
    expert_shard: int = 1
    """Ranks that FSDP shards each expert over."""
    replicate: int = 1
    """Replicas of all of it."""


@frozen
class Held:
    """One tensor as the first rank of every group has it, which no other rank's part exceeds."""

    parameter: Parameter
    local: tuple[int, ...]
    """What tensor and expert parallel leave of it."""
    split: int | None
    """Dimension that tensor or expert parallel has split; None where neither has."""
    ranks: int
    """Ranks that FSDP shards it over; 1 for what FSDP leaves whole."""
    dimension: int
    """Dimension that FSDP shards."""

    @cached_property
    def part(self) -> tuple[int, ...]:
        """The rank's shard."""
        size = -(-self.local[self.dimension] // self.ranks)
        return (*self.local[: self.dimension], size, *self.local[self.dimension + 1 :])

    @cached_property
    def part_elements(self) -> int:
        """Elements of the shard."""
        return math.prod(self.part)

    @property
    def gathered_elements(self) -> int:
        """Elements that an all-gather ends with, padding included."""
        return self.part_elements * self.ranks


def is_whole_vector(parameter: Parameter) -> bool:
    """Whether FSDP leaves a parameter out: the fp32 vectors of delta attention."""
    return parameter.fp32 and len(parameter.shape) == 1 and parameter.optimizer != "none"


def held(parameter: Parameter, degrees: Degrees) -> Held | None:
    """A rank's part of a parameter; None where the ranks cannot share it evenly, as they would have to."""
    split = _split(parameter, degrees)
    local = list(parameter.shape)
    if split is not None:
        local[split] //= degrees.expert if parameter.sharding == "expert" else degrees.tensor
    ranks = degrees.expert_shard if parameter.sharding == "expert" else degrees.dense
    ranks = 1 if is_whole_vector(parameter) else ranks
    dimension = shard_dimension(tuple(local), split, ranks)
    return None if dimension is None else Held(parameter, tuple(local), split, ranks, dimension)


def _split(parameter: Parameter, degrees: Degrees) -> int | None:
    match parameter.sharding:
        case "column" | "vocabulary" if degrees.tensor > 1:
            return 0
        case "row" if degrees.tensor > 1:
            return 1
        case "expert" if degrees.expert > 1:
            return 0
    return None


def shard_dimension(local: tuple[int, ...], split: int | None, ranks: int) -> int | None:
    """Dimension that FSDP shards of a tensor of shape `local`, split along `split` already; None for none."""
    if local[0] % ranks == 0 or (split != 0 and (len(local) < 3 or local[0] >= ranks)):
        return 0
    return next((d for d in range(1, len(local)) if d != split and local[d] % ranks == 0), None)


@frozen
class Split:
    """Shapes that FSDP must share evenly: what tp splits along dimension 0, and stacks of experts."""

    dense: tuple[tuple[int, ...], ...] = ()
    experts: tuple[tuple[int, ...], ...] = ()

    def shares_dense(self, tensor: int, ranks: Ints) -> Flags:
        """Which numbers of ranks can shard what `tensor` ranks of tp leave."""
        shapes = self.dense if tensor > 1 else ()
        return _shared(shapes, tensor, ranks, 0)

    def shares_experts(self, expert: int, ranks: Ints) -> Flags:
        """Which numbers of ranks can shard the experts that `expert` ranks of ep leave."""
        return _shared(self.experts, expert, ranks, 0 if expert > 1 else None)

    def obstacle(self, tensor: int, ranks: int) -> str:
        """The first block of what tp leaves that cannot be shared, in words; empty when all can."""
        for shape in self.dense if tensor > 1 else ():
            local = (shape[0] // tensor, *shape[1:])
            if shape[0] % tensor == 0 and shard_dimension(local, 0, ranks) is None:
                return " x ".join(str(n) for n in local)
        return ""


UNSPLIT = Split()
"""Of a model that nothing splits."""


def _shared(shapes: Iterable[tuple[int, ...]], degree: int, ranks: Ints, split: int | None) -> Flags:
    """For each number of ranks, whether all shapes have a `shard_dimension`, the first size over `degree`."""
    shared = np.ones(len(ranks), dtype=bool)
    for first, *others in shapes:
        local = first // degree
        some = local % ranks == 0
        if split != 0:
            some |= (local >= ranks) | (len(others) < 2)
        for size in others:
            some |= size % ranks == 0
        shared &= some & (first % degree == 0)
    return shared


def split_shapes(parameters: Iterable[Parameter]) -> Split:
    """What tensor and expert parallel split along dimension 0 and FSDP shards."""
    kept = [p for p in parameters if p.optimizer != "none" and not is_whole_vector(p)]
    return Split(
        tuple(sorted({p.shape for p in kept if p.sharding in ("column", "vocabulary")})),
        tuple(sorted({p.shape for p in kept if p.sharding == "expert"})),
    )
