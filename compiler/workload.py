"""A lowered model as rows for the cost model: the first part, each kind of layer, the last part.

A pipeline stage is a number of layers of each kind, with the first row on the first stage and the last
row on the last, so that cost grows with the kinds of layers and not with the layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from shipway.compiler.frozen import frozen
from shipway.compiler.lower import LoweredModel, Part, final_sources, sources_read
from shipway.compiler.operators.base import Limit, Operator, Parameter
from shipway.compiler.unique import distinct

FIRST, LAST = 0, -1


@frozen(eq=False)
class Row:
    """What the pipeline never cuts."""

    name: str
    parts: tuple[Part, ...]
    recomputable: bool
    """Whether the recomputation policy applies: to layers, not to the embedding or the head."""

    def operators(self) -> Iterator[tuple[str, Operator]]:
        """Every operator with its path."""
        for part in self.parts:
            for placed in part.operators:
                yield placed.path, placed.operator

    def parameters(self) -> tuple[Parameter, ...]:
        """Every tensor."""
        return self._parameters

    @cached_property
    def _parameters(self) -> tuple[Parameter, ...]:
        return tuple(parameter for part in self.parts for parameter in part.parameters())

    @property
    def movable_states(self) -> int:
        """Hidden states kept under full recomputation that can wait in host memory."""
        return sum(part.movable_states for part in self.parts)

    def buffer_bytes(self) -> int:
        """Device memory that is neither a parameter nor in a checkpoint: routers' counters."""
        return sum(part.buffer_bytes() for part in self.parts)


@frozen(eq=False)
class Workload:
    """Rows, and which row each layer is."""

    rows: tuple[Row, ...]
    layer_rows: npt.NDArray[np.int64]
    """Row of each layer, shape [layers]."""
    states_before: npt.NDArray[np.int64]
    """Hidden states that a stage starting at each layer receives, shape [layers + 1]."""
    width: int
    tied: bool

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.layer_rows)

    @cached_property
    def totals(self) -> npt.NDArray[np.int64]:
        """How often each row occurs in the model, shape [rows]."""
        counts = np.bincount(self.layer_rows, minlength=len(self.rows))
        counts[FIRST] = counts[LAST] = 1
        return counts

    @cached_property
    def layer_kinds(self) -> npt.NDArray[np.int64]:
        """Rows that are layers, in rising order."""
        return np.array(distinct(self.layer_rows))

    @cached_property
    def rows_ahead(self) -> npt.NDArray[np.float64]:
        """How often each row occurs before each layer, shape [layers + 1, rows]."""
        ahead = np.zeros((self.layers + 1, len(self.rows)))
        ahead[np.arange(1, self.layers + 1), self.layer_rows] = 1
        return ahead.cumsum(axis=0, out=ahead)

    @cached_property
    def telling_layers(self) -> npt.NDArray[np.int64]:
        """The first and the last layer of each kind, in rising order; the last of all is among them."""
        _, first = np.unique(self.layer_rows, return_index=True)
        _, behind = np.unique(self.layer_rows[::-1], return_index=True)
        return np.unique(np.concatenate([first, self.layers - 1 - behind]))

    @cached_property
    def buffer_bytes(self) -> npt.NDArray[np.float64]:
        """Bytes of routers' counters in each row, shape [rows]."""
        return np.array([row.buffer_bytes() for row in self.rows], dtype=float)

    def limits(self) -> tuple[Limit, ...]:
        """What each parallel degree must divide, without repetition."""
        found: dict[Limit, None] = {}
        for row in self.rows:
            for part in row.parts:
                found |= dict.fromkeys(part.limits())
        return tuple(found)


def workload(lowered: LoweredModel) -> Workload:
    """Rows of a lowered model."""
    kinds = [part for part, _ in lowered.layer_kinds()]
    first = (lowered.embedding, *((lowered.vision,) if lowered.vision is not None else ()))
    last = (lowered.final, lowered.head, *lowered.prediction)
    rows = (
        Row("embedding", first, False),
        *(Row(part.name, (part,), True) for part in kinds),
        Row("head", last, False),
    )
    index = {part: position for position, part in enumerate(kinds, start=1)}
    model = lowered.model
    received = [sources_read(model, layer) for layer in range(model.layers)]
    states = [1 if sources is None else sources[0] for sources in received]
    return Workload(
        rows=rows,
        layer_rows=np.array([index[part] for part in lowered.layers], dtype=np.int64),
        states_before=np.array([*states, max(final_sources(model), 1)], dtype=np.int64),
        width=model.width,
        tied=model.tied_embeddings,
    )
