"""The legal device meshes of a training stage, as arrays.

What tensor, context and data parallel allow each other does not depend on the pipeline: it is worked out
once for each *block* of (data, cp, tp), and a mesh is a number of pipeline ranks of one block. A *way* is
a split of a block's data parallel into replicas and shards.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.space import (
    Space,
    delta_heads_allowed,
    divisors,
    expert_degrees,
    legal_context,
    legal_pipeline,
    legal_tensor,
)
from shipway.compiler.unique import first_rows

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]


@frozen(eq=False)
class Meshes:
    """Meshes in the order of tp, cp, pp and data; the ways of each block, the most shards last."""

    pp: IntArray
    """[meshes]."""
    block: IntArray
    """[meshes]."""
    data: IntArray
    """[blocks], as are cp and tp."""
    cp: IntArray
    tp: IntArray
    first_way: IntArray
    """[blocks + 1]: where the ways of each block begin."""
    replicate: IntArray
    """[ways]."""
    shard: IntArray
    """[ways]."""
    experts: tuple[int, ...]
    """Expert-parallel degrees."""
    allowed: BoolArray
    """[ways, experts]: which degrees each way allows."""

    def ways(self, blocks: IntArray) -> tuple[IntArray, IntArray]:
        """All ways of each of some blocks: positions among `blocks`, and ways."""
        counts = self.first_way[blocks + 1] - self.first_way[blocks]
        which = np.repeat(np.arange(len(blocks)), counts)
        before = np.cumsum(counts) - counts
        return which, np.arange(len(which)) + (self.first_way[blocks] - before)[which]

    def block_of(self, data: IntArray, cp: IntArray, tp: IntArray) -> IntArray:
        """Blocks of given degrees."""
        keys = zip(self.data.tolist(), self.cp.tolist(), self.tp.tolist(), strict=True)
        block = {key: number for number, key in enumerate(keys)}
        wanted = zip(data.tolist(), cp.tolist(), tp.tolist(), strict=True)
        return np.array([block[key] for key in wanted], dtype=np.int64)

    def choices(self) -> IntArray:
        """Ways and expert degrees that each block allows together, their number, [blocks]."""
        sums = np.append(0, np.cumsum(self.allowed.sum(axis=1)))
        number: IntArray = sums[self.first_way[1:]] - sums[self.first_way[:-1]]
        return number

    def every(self) -> IntArray:
        """Rows of (pp, replicate, shard, cp, tp, ep) of every way and expert degree."""
        which, way = self.ways(self.block)
        row, expert = np.nonzero(self.allowed[way])
        return self._rows(which[row], way[row], expert)

    def widest(self) -> IntArray:
        """The same of the way with the most shards that a degree allows."""
        last = np.full((len(self.data), len(self.experts)), -1)
        held = np.flatnonzero(np.diff(self.first_way))
        if len(held):
            way = np.where(self.allowed, np.arange(len(self.allowed))[:, None], -1)
            last[held] = np.maximum.reduceat(way, self.first_way[held], axis=0)
        mine = last[self.block]
        which, expert = np.nonzero(mine >= 0)
        return self._rows(which, mine[which, expert], expert)

    def _rows(self, mesh: IntArray, way: IntArray, expert: IntArray) -> IntArray:
        block = self.block[mesh]
        degrees = np.array(self.experts, dtype=np.int64)[expert]
        return np.column_stack(
            [self.pp[mesh], self.replicate[way], self.shard[way], self.cp[block], self.tp[block], degrees]
        )


@lru_cache(maxsize=8)
def meshes(space: Space) -> Meshes:
    """All legal meshes; those that leave most devices idle only where none uses more or size is free."""
    data = np.array(divisors(space.sequences))
    whose, replicate, shard = _splits(space, data)
    pipelines = np.array(legal_pipeline(space), dtype=np.int64)
    pairs = [pair for pair in _tensor_and_context(space) if len(pipelines)]
    held, pp, block = [], [], []
    for number, (tp, cp) in enumerate(pairs):
        held.append(space.split.shares_dense(tp, shard * cp))
        split = np.bincount(whose[held[-1]], minlength=len(data)) > 0
        rank, one = np.nonzero(_fills_nodes(space, cp * tp, pipelines, data) & split)
        pp.append(pipelines[rank])
        block.append(number * len(data) + one)
    of_pairs = np.array(pairs, dtype=np.int64).reshape(-1, 2)
    tensor, context = np.repeat(of_pairs, len(data), axis=0).T
    pair, way = np.nonzero(np.array(held, dtype=bool).reshape(len(pairs), len(shard)))
    counts = np.bincount(pair * len(data) + whose[way], minlength=len(tensor))
    experts = tuple(expert_degrees(space))
    made = Meshes(
        pp=_joined(pp),
        block=_joined(block),
        data=np.tile(data, len(pairs)),
        cp=context,
        tp=tensor,
        first_way=np.append(0, np.cumsum(counts)),
        replicate=replicate[way],
        shard=shard[way],
        experts=experts,
        allowed=_experts_allowed(space, experts, shard[way] * of_pairs[pair].prod(axis=1)),
    )
    return made if space.any_size else _largest(space, made)


def legal_meshes(space: Space, *, widest: bool = False) -> IntArray:
    """Rows of (pp, replicate, shard, cp, tp, ep)."""
    made = meshes(space)
    return made.widest() if widest else made.every()


def _tensor_and_context(space: Space) -> list[tuple[int, int]]:
    """Tensor- and context-parallel degrees that go together."""
    by_heads = space.constraints.delta_context == "heads"
    return [
        (tp, cp)
        for tp in legal_tensor(space)
        for cp in legal_context(space)
        if space.context % (cp * tp * space.granule) == 0
        and tp * cp <= space.devices
        and (not by_heads or delta_heads_allowed(space, cp, tp))
    ]


def _splits(space: Space, data: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """Ways to divide data parallel, as far as pins allow: whose, replicas, shards, the most shards last."""
    shards, replicas = space.constraints.data_parallel_shard, space.constraints.data_parallel_replicate
    rows = [
        (index, degree // shard, shard)
        for index, degree in enumerate(data.tolist())
        for shard in divisors(degree)
        if shards in (None, shard) and replicas in (None, degree // shard)
    ]
    whose, replicate, shard = np.array(rows, dtype=np.int64).reshape(-1, 3).T
    return whose, replicate, shard


def _fills_nodes(space: Space, inner: int, pipelines: IntArray, data: IntArray) -> BoolArray:
    """[pipelines, data]: whether there are devices enough, and nodes are used whole or shared evenly."""
    world = pipelines[:, None] * inner * data
    even = (world % space.devices_per_node == 0) | (space.devices_per_node % world == 0)
    result: BoolArray = even & (world <= space.devices)
    return result


def _largest(space: Space, made: Meshes) -> Meshes:
    """Without the meshes that leave more than half of the devices idle, as far as others use more."""
    if not len(made.pp):
        return made
    block = made.block
    world = made.pp * made.data[block] * made.cp[block] * made.tp[block]
    kept = 2 * world > min(space.devices, 2 * world.max() - 1)
    return replace(made, pp=made.pp[kept], block=block[kept])


def _experts_allowed(space: Space, degrees: tuple[int, ...], region: IntArray) -> BoolArray:
    """[regions, degrees]: whether an expert degree divides its region of dp_shard x cp x tp, and FSDP can
    share the rest."""
    first, which = first_rows(region)
    distinct = region[first]
    allowed = np.empty((len(distinct), len(degrees)), dtype=bool)
    for column, degree in zip(allowed.T, degrees, strict=True):
        ranks = np.maximum(distinct // degree, 1)
        column[:] = (distinct % degree == 0) & space.split.shares_experts(degree, ranks)
    result: BoolArray = allowed[which]
    return result


def _joined(parts: list[IntArray]) -> IntArray:
    return np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
