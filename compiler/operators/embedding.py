"""Token embedding."""

from __future__ import annotations

from fractions import Fraction

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Elementwise,
    Kernel,
    Limit,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.schemas.layout import Recompute

TOKEN_BYTES = 8
"""Token ids are int64."""


@frozen
class Embedding(Operator):
    """Lookup of `vocabulary` rows of `width`; tensor parallel cuts the vocabulary."""

    vocabulary: int
    width: int
    block: str = "embedding"

    def parameters(self) -> tuple[Parameter, ...]:
        # No product passes the table: publishers leave it out of the active count.
        return (
            Parameter("weight", (self.vocabulary, self.width), "vocabulary", active_fraction=Fraction(0)),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        size = shard.tokens * self.width * shard.element_bytes
        return (Elementwise("embedding", 2 * size, 2 * size),)

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        return (Saved("tokens", shard.tokens * TOKEN_BYTES),)

    def scratch_bytes(self, shard: Shard) -> Number:
        return shard.tokens * self.width * shard.element_bytes

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        return embedding_transfers(self.width, shard)

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "vocabulary", self.vocabulary),)


def embedding_transfers(width: int, shard: Shard) -> tuple[Transfer, ...]:
    """Each rank looks up the tokens in its rows of the table; the sum is shared over the sequence."""
    size = shard.tokens * width * shard.element_bytes
    return (
        Transfer("embedding output", "tp", "reduce_scatter", size, "forward"),
        Transfer("embedding output gradient", "tp", "all_gather", size, "backward"),
    )
