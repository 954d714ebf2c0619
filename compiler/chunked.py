"""Layouts of one number of pipeline ranks and chunks, cut; sums over the layers of each chunk.

Chunks stand in columns by where they sit: column c is on pipeline rank c mod pp. That is model order, but
for V-shaped schedules, whose second chunks come back up the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.fabric import axis_groups
from shipway.compiler.frozen import frozen
from shipway.compiler.layouts import RECOMPUTE, SCHEDULES, Candidates
from shipway.compiler.tables import Tables, cut_bounds
from shipway.compiler.unique import first_rows, unique_rows
from shipway.compiler.workload import FIRST, LAST, Workload
from shipway.schemas.layout import V_SHAPED, Schedule

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

ALWAYS = ("forward", "weight", "waiting", "moved")
"""Quantities of a cell that no recomputation policy changes."""


@frozen(eq=False)
class Chunked:
    """Layouts of one number of chunks, cut; sums over the layers of each chunk."""

    shared: Tables
    own: Candidates
    """All of one schedule, or of none that is V-shaped."""
    pp: int
    bounds: Ints
    """[layouts, chunks + 1], in model order."""

    @cached_property
    def schedule(self) -> Schedule:
        """What orders the passes; of layouts in one order of chunks, the first one's."""
        return SCHEDULES[int(self.own.schedule[0])] if len(self.own) else "none"

    @cached_property
    def order(self) -> Ints:
        """The chunk in each column; the same selection brings columns back into model order."""
        chunks = np.arange(self.bounds.shape[1] - 1)
        return np.append(chunks[: self.pp], chunks[: self.pp - 1 : -1]) if self.is_v_shaped else chunks

    @property
    def is_v_shaped(self) -> bool:
        """Whether each rank's second chunk comes back up the ranks."""
        return self.schedule in V_SHAPED

    @property
    def is_split(self) -> npt.NDArray[np.bool_]:
        """Whether weights' gradients are put off: recomputation keeps backward whole."""
        kept = self.own.recompute == RECOMPUTE.index("none")
        return kept if self.is_v_shaped else np.zeros_like(kept)

    @cached_property
    def cores(self) -> tuple[Chunked, Ints]:
        """One layout of each core, and which of them each layout has.

        Layouts of a core, which differ in how states are sharded alone, have their cut, passes and
        activations in common.
        """
        own = self.own
        first, which = first_rows(self.cell, own.recompute, own.schedule, own.micro_batches, own.world)
        if len(first) == len(own):
            return self, np.arange(len(own))
        return Chunked(self.shared.take(first), own.take(first), self.pp, self.bounds[first]), which

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
        result: Floats = (at[:, 1:] - at[:, :-1])[:, self.order]
        return result

    def cells(self, name: str) -> Floats:
        """Chunk sums of a quantity per cell, under each layout's recomputation policy."""
        if name in ALWAYS:
            return self.between(self.shared.running(name), self.cell)
        policy = self.own.recompute * len(self.shared.cells)
        return self.between(self.shared.under_each_policy(name), policy + self.cell)

    def states(self, name: str) -> Floats:
        """Chunk sums of a quantity per sharding."""
        return self.between(self.shared.running(name), self.sharding)

    @cached_property
    def counts(self) -> Floats:
        """How often each row occurs in each chunk: [layouts, chunks, rows]."""
        cores, core = self.cores
        if cores is not self:
            return cores.counts[core]
        return row_counts(self.shared.work, self.bounds)[:, self.order]

    @cached_property
    def present(self) -> npt.NDArray[np.bool_]:
        """Whether each row occurs in each chunk: [layouts, chunks, rows]."""
        return self.counts > 0

    def sum(self, per_row: Floats) -> Floats:
        """[rows, layouts] summed over the rows of each chunk: [layouts, chunks]."""
        result: Floats = np.matmul(self.counts, per_row.T[:, :, None])[..., 0]
        return result

    def max(self, per_row: Floats) -> Floats:
        """[rows, layouts], largest over the rows that a chunk has."""
        result: Floats = np.where(self.present, per_row.T[:, None, :], 0.0).max(axis=2)
        return result


def chunk(candidates: Candidates, shared: Tables) -> Iterator[tuple[Ints, Chunked]]:
    """Cut layouts, and deal them out by their pipeline ranks and chunks: positions, and what is there."""
    bounds = cut_bounds(shared, candidates)
    shapes, which = unique_rows(candidates.pp, candidates.chunks, candidates.v_schedule)
    for number, (pp, chunks, _) in enumerate(shapes.tolist()):
        index = np.flatnonzero(which == number)
        own = bounds[index, : chunks + 1]
        yield index, Chunked(shared.take(index), candidates.take(index), pp, own)


def row_counts(work: Workload, bounds: Ints) -> Floats:
    """How often each row occurs in each chunk: [layouts, chunks, rows]."""
    ahead = work.rows_ahead[bounds]
    counts = ahead[:, 1:] - ahead[:, :-1]
    counts[:, 0, FIRST] = 1
    counts[:, -1, LAST] = 1
    return counts


def handed_over(chunked: Chunked) -> tuple[Floats, Floats]:
    """Bytes of hidden states that each chunk receives, and of gradients that come back to it.

    Between chunks of one rank nothing is sent, but torch holds on to both all the same.
    """
    states = (
        chunked.shared.work.states_before[chunked.bounds] * chunked.shared.parts.hidden[chunked.cell][:, None]
    )
    received, returned = states[:, :-1].copy(), states[:, 1:].copy()
    received[:, 0] = 0.0
    returned[:, -1] = 0.0
    return received[:, chunked.order], returned[:, chunked.order]


def groups_of(own: Candidates) -> dict[str, tuple[Ints, Ints]]:
    """(size, stride) of every process group of each layout."""
    return axis_groups(own.pp, own.replicate, own.shard, own.cp, own.tp, own.ep)
