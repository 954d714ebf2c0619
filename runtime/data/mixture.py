"""Which source each row comes from: shares are met at every moment, not only on average."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from shipway.runtime.data.errors import DataError


class Mixture:
    """Deals rows to sources by largest deficit: after r rows a source has its share of r, within a few rows.

    The choice depends on the counts alone, so a resume needs nothing else. No chance is involved:
    a source of weight 1 % gives a row in every hundred.
    """

    def __init__(self, weights: Mapping[str, float]) -> None:
        used = {name: weight for name, weight in sorted(weights.items()) if weight > 0}
        if not used:
            raise DataError("no data source has a weight above zero in this stage's mix")
        self.names = tuple(used)
        shares = np.array(list(used.values()), dtype=np.float64)
        self._shares = shares / shares.sum()
        self._counts = np.zeros(len(used), dtype=np.int64)

    def next(self) -> str:
        """Source of the next row."""
        deficit = self._shares * (self._counts.sum() + 1) - self._counts
        chosen = int(np.argmax(deficit))
        self._counts[chosen] += 1
        return self.names[chosen]

    def state_dict(self) -> dict[str, int]:
        """Rows dealt to each source."""
        return {name: int(count) for name, count in zip(self.names, self._counts, strict=True)}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue from saved counts."""
        self._counts = np.array([state.get(name, 0) for name in self.names], dtype=np.int64)


def stage_weights(mix: Mapping[str, float] | None, sources: Mapping[str, object]) -> dict[str, float]:
    """A stage's weights: its `mix`, or all sources equally. Raises DataError for an unknown source."""
    if mix is None:
        return dict.fromkeys(sources, 1.0)
    unknown = sorted(set(mix) - set(sources))
    if unknown:
        raise DataError(f"the mix names {unknown[0]!r}, and the sources are {', '.join(sorted(sources))}")
    return dict(mix)
