"""Layouts of one number of pipeline ranks and chunks, cut; sums over the layers of each chunk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.evaluate_parts import POLICIES
from shipway.compiler.fabric import axis_groups
from shipway.compiler.layouts import Candidates
from shipway.compiler.tables import Tables, cut_bounds
from shipway.compiler.workload import FIRST, LAST, Workload

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Chunked:
    """Layouts of one number of chunks, cut; sums over the layers of each chunk."""

    shared: Tables
    own: Candidates
    pp: int
    bounds: Ints

    @property
    def cell(self) -> Ints:
        """Cell of each layout."""
        return self.shared.cell_of

    @property
    def sharding(self) -> Ints:
        """Sharding of each layout."""
        return self.shared.sharding_of

    def between(self, running: Floats, which: Ints) -> Floats:
        """Sums of a quantity over each chunk: [layouts, chunks]."""
        at = running[which[:, None], self.bounds]
        result: Floats = at[:, 1:] - at[:, :-1]
        return result

    def cells(self, name: str) -> Floats:
        """Chunk sums of a quantity per cell, under each layout's recomputation policy."""
        if name == "forward":
            return self.between(self.shared.running(name), self.cell)
        result = np.empty((len(self.own), self.bounds.shape[1] - 1))
        for policy in range(POLICIES):
            mine = np.flatnonzero(self.own.recompute == policy)
            if len(mine):
                running = self.shared.running(name, policy)
                at = running[self.cell[mine][:, None], self.bounds[mine]]
                result[mine] = at[:, 1:] - at[:, :-1]
        return result

    def states(self, name: str) -> Floats:
        """Chunk sums of a quantity per sharding."""
        return self.between(self.shared.running(name), self.sharding)

    @cached_property
    def counts(self) -> Floats:
        """How often each row occurs in each chunk: [layouts, chunks, rows]."""
        return row_counts(self.shared.work, self.bounds)

    def sum(self, per_row: Floats) -> Floats:
        """[rows, layouts] summed over the rows of each chunk: [layouts, chunks]."""
        result: Floats = np.matmul(self.counts, per_row.T[:, :, None])[..., 0]
        return result

    def max(self, per_row: Floats) -> Floats:
        """[rows, layouts], largest over the rows that a chunk has."""
        present = self.counts > 0
        result: Floats = np.where(present, per_row.T[:, None, :], 0.0).max(axis=2)
        return result


def chunk(own: Candidates, shared: Tables, pp: int, chunks: int) -> Chunked:
    """Cut layouts that all have `pp` ranks and `chunks` chunks."""
    return Chunked(shared, own, pp, cut_bounds(shared, own, chunks))


def row_counts(work: Workload, bounds: Ints) -> Floats:
    """How often each row occurs in each chunk: [layouts, chunks, rows]."""
    ahead = np.zeros((work.layers + 1, len(work.rows)))
    ahead[np.arange(1, work.layers + 1), work.layer_rows] = 1
    ahead = ahead.cumsum(axis=0)
    counts = ahead[bounds[:, 1:]] - ahead[bounds[:, :-1]]
    counts[:, 0, FIRST] = 1
    counts[:, -1, LAST] = 1
    return counts


def handed_over(chunked: Chunked) -> tuple[Floats, Floats]:
    """Bytes of hidden states that each chunk receives, and of gradients that come back to it."""
    states = (
        chunked.shared.work.states_before[chunked.bounds] * chunked.shared.parts.hidden[chunked.cell][:, None]
    )
    received, returned = states[:, :-1].copy(), states[:, 1:].copy()
    received[:, 0] = 0.0
    returned[:, -1] = 0.0
    return received, returned


def groups_of(own: Candidates) -> dict[str, tuple[Ints, Ints]]:
    """(size, stride) of every process group of each layout."""
    return axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)
