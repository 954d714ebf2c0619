"""Cut cores with equally many chunks on each rank, whatever their ranks: sums over the layers of each chunk.

Bounds look at many cores of many shapes: dealt out by shape (`chunked`) they would be a few at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.layouts import Candidates
from shipway.compiler.tables import Tables, cut_bounds
from shipway.compiler.unique import distinct

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@frozen(eq=False)
class Placed:
    """Sums have shape [cores, chunks of a rank, most ranks], and are 0 on ranks that a core does not have."""

    shared: Tables
    own: Candidates
    chunk: Ints
    """The chunk that sits there, in model order; beyond the last one where there is no such rank."""
    begins: Ints
    """Its first layer; the number of layers where there is no such rank."""
    ends: Ints

    @property
    def is_piped(self) -> bool:
        """Whether there are several ranks; with one alone there is no core that has more."""
        return bool(self.begins.shape[2] > 1)

    @cached_property
    def is_v_shaped(self) -> Flags:
        """Whether each rank's second chunk comes back up the ranks, [cores]."""
        return self.own.v_schedule > 0

    def cells(self, name: str) -> Floats:
        """Chunk sums of a quantity per cell that no policy changes."""
        return self._between(self.shared.running(name), self.shared.cell_of)

    def by_policy(self, name: str) -> Floats:
        """Chunk sums of a quantity per cell, under each core's recomputation policy."""
        cells = len(self.shared.cells)
        running = self.shared.under_each_policy(name)
        return self._between(running, self.own.recompute * cells + self.shared.cell_of)

    def states(self, name: str) -> Floats:
        """Chunk sums of a quantity per sharding."""
        return self._between(self.shared.running(name), self.shared.sharding_of)

    @cached_property
    def received(self) -> Floats:
        """Bytes of hidden states that each chunk receives."""
        return np.where(self.chunk > 0, self._arriving(self.begins), 0.0)

    @cached_property
    def returned(self) -> Floats:
        """Bytes of gradients that come back to each chunk."""
        return np.where(self.ends < self.shared.work.layers, self._arriving(self.ends), 0.0)

    def _arriving(self, layer: Ints) -> Floats:
        hidden = self.shared.parts.hidden[self.shared.cell_of]
        states = np.where(self.begins < self.shared.work.layers, self.shared.work.states_before[layer], 0)
        size: Floats = states * hidden[:, None, None]
        return size

    def _between(self, running: Floats, which: Ints) -> Floats:
        # Flat positions: one index is gathered by in half the time of two.
        row = (which * running.shape[1])[:, None, None]
        flat = running.ravel()
        result: Floats = flat[row + self.ends] - flat[row + self.begins]
        return result


def placed(candidates: Candidates, shared: Tables) -> Iterator[tuple[Ints, Placed]]:
    """Cut cores, and deal them out by the chunks of a rank; those without a pipeline stand apart."""
    bounds = cut_bounds(shared, candidates)
    beyond = bounds.shape[1]
    bounds = np.column_stack([bounds, np.full((len(bounds), 2), shared.work.layers)])
    kind = np.where(candidates.pp == 1, 0, candidates.virtual)
    for number in distinct(kind):
        index = np.flatnonzero(kind == number)
        own = candidates.take(index)
        chunk = _chunks(own, beyond)
        at = np.arange(len(index))[:, None, None]
        mine = bounds[index]
        yield index, Placed(shared.take(index), own, chunk, mine[at, chunk], mine[at, chunk + 1])


def _chunks(own: Candidates, beyond: int) -> Ints:
    """The chunk in each place; `beyond` where there is no such rank."""
    pp, virtual = own.pp[:, None, None], int(own.virtual[0])
    rank, number = np.arange(int(own.pp.max())), np.arange(virtual)[:, None]
    chunk = number * pp + rank
    if virtual == 2:
        chunk = np.where((own.v_schedule > 0)[:, None, None] & (number == 1), 2 * pp - 1 - rank, chunk)
    result: Ints = np.where(rank < pp, chunk, beyond)
    return result
