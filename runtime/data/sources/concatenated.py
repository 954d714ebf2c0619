"""Several collections of records as one."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from shipway.runtime.data.documents import Records

_BLOCK_RECORDS = 1024


class Concatenated:
    """The parts' records, numbered through. Where one part comes in blocks, all do."""

    def __init__(self, parts: Sequence[Records]) -> None:
        self._parts = parts
        self._ends = np.cumsum([part.count for part in parts], dtype=np.int64)
        self.count = int(self._ends[-1]) if parts else 0
        self.fingerprint = hashlib.sha256("".join(p.fingerprint for p in parts).encode()).hexdigest()[:16]
        in_blocks = any(part.blocks is not None for part in parts)
        self.blocks = np.concatenate([_blocks(part) for part in parts]) if in_blocks else None

    def read(self, index: int) -> str:
        """As the part that holds the record reads it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        part = self._parts[number]
        return part.read(index - int(self._ends[number]) + part.count)


def _blocks(part: Records) -> NDArray[np.int64]:
    if part.blocks is not None:
        return part.blocks
    whole, left = divmod(part.count, _BLOCK_RECORDS)
    return np.array([_BLOCK_RECORDS] * whole + [left] * (left > 0), dtype=np.int64)
