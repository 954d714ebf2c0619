"""The order in which an epoch visits a source's documents: a pure function of seed, name and epoch."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.permutation import derive_key, permute

BLOCKS_MIXED = 4


class Order:
    """Visits every document once per epoch, shuffled anew each time.

    Where any order costs the same, all documents are permuted at once. Where documents come in
    blocks that must be decoded whole (Parquet row groups), blocks are permuted and the documents
    of a few neighbouring blocks are permuted together, so that a block is decoded once per epoch.
    """

    def __init__(self, count: int, blocks: NDArray[np.int64] | None, seed: int, name: str) -> None:
        self.count = count
        self._starts = None if blocks is None else np.concatenate([[0], np.cumsum(blocks)]).astype(np.int64)
        self._seed = seed
        self._name = name
        self._groups_of_epoch: tuple[int, list[NDArray[np.int64]], NDArray[np.int64]] | None = None

    def documents(self, epoch: int, start: int, stop: int) -> NDArray[np.int64]:
        """Documents at positions start..stop-1 of `epoch`; stop is at most `count`."""
        if self._starts is None:
            key = derive_key(self._seed, self._name, epoch)
            return permute(np.arange(start, stop, dtype=np.int64), self.count, key)
        groups, group_starts = self._groups(epoch)
        found = []
        while start < stop:
            group = int(np.searchsorted(group_starts, start, side="right")) - 1
            end = min(stop, int(group_starts[group + 1]))
            found.append(
                self._in_group(epoch, group, groups[group], start - group_starts[group], end - start)
            )
            start = end
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def _groups(self, epoch: int) -> tuple[list[NDArray[np.int64]], NDArray[np.int64]]:
        """Blocks of each group in the epoch's order, and the position at which each group starts."""
        if self._groups_of_epoch is None or self._groups_of_epoch[0] != epoch:
            assert self._starts is not None
            blocks = len(self._starts) - 1
            key = derive_key(self._seed, self._name, epoch, "blocks")
            shuffled = permute(np.arange(blocks, dtype=np.int64), blocks, key)
            groups = [shuffled[i : i + BLOCKS_MIXED] for i in range(0, blocks, BLOCKS_MIXED)]
            sizes = np.diff(self._starts)
            starts = np.concatenate([[0], np.cumsum([sizes[g].sum() for g in groups])]).astype(np.int64)
            self._groups_of_epoch = (epoch, groups, starts)
        return self._groups_of_epoch[1:]

    def _in_group(
        self, epoch: int, group: int, blocks: NDArray[np.int64], offset: int, count: int
    ) -> NDArray[np.int64]:
        assert self._starts is not None
        sizes = np.diff(self._starts)[blocks]
        ends = np.cumsum(sizes)
        key = derive_key(self._seed, self._name, epoch, "group", group)
        within = permute(np.arange(offset, offset + count, dtype=np.int64), int(ends[-1]), key)
        block = np.searchsorted(ends, within, side="right")
        documents: NDArray[np.int64] = self._starts[blocks[block]] + within - (ends - sizes)[block]
        return documents
