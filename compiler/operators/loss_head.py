"""Output projection fused with cross-entropy, chunk by chunk of tokens."""

from __future__ import annotations

from dataclasses import dataclass

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
from shipway.compiler.operators.linear import gemm
from shipway.schemas.layout import Recompute

CHUNK_TOKENS = 1024
"""Tokens whose logits exist at once."""
LOGIT_BYTES = 4
"""Logits are fp32."""
LABEL_BYTES = 8
"""Labels are int64."""


@dataclass(frozen=True)
class LossHead(Operator):
    """Sum of token losses over a vocabulary that tensor parallel cuts; logits are recomputed in backward."""

    vocabulary: int
    width: int
    tied: bool = False
    """Whether the weight is the embedding's, which then owns it."""
    block: str = "head"

    def parameters(self) -> tuple[Parameter, ...]:
        if self.tied:
            return ()
        return (Parameter("weight", (self.vocabulary, self.width), "vocabulary"),)

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        vocabulary = self.vocabulary / shard.tensor
        logits = shard.tokens * vocabulary * LOGIT_BYTES
        return (
            gemm("head", shard.tokens, self.width, vocabulary),
            Elementwise("cross-entropy", 3 * logits, 2 * logits),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        hidden = shard.tokens * self.width * shard.element_bytes
        return (Saved("hidden", hidden), Saved("labels", shard.tokens * LABEL_BYTES))

    def recomputed(self, shard: Shard, recompute: Recompute) -> tuple[Kernel, ...]:
        return self.kernels(shard)

    def scratch_bytes(self, shard: Shard) -> Number:
        """One chunk's logits and their gradient."""
        return 2 * CHUNK_TOKENS * self.vocabulary / shard.tensor * LOGIT_BYTES

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        size = shard.tokens * self.width * shard.element_bytes
        # Vocabulary-parallel cross-entropy reduces the maximum, the sum and the target's logit.
        statistics = 3 * shard.tokens * LOGIT_BYTES
        return (
            Transfer("head input", "tp", "all_gather", size, "forward"),
            Transfer("loss statistics", "tp", "all_reduce", statistics, "forward"),
            Transfer("head input gradient", "tp", "reduce_scatter", size, "backward"),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "vocabulary", self.vocabulary),)
