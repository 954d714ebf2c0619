"""Output projection fused with cross-entropy, chunk by chunk of tokens."""

from __future__ import annotations

import numpy as np

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Elementwise,
    Gemm,
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

LOGIT_BYTES = 4
"""Statistics of logits, and sums over chunks of tokens, are fp32."""


@frozen
class LossHead(Operator):
    """Sum of token losses, the vocabulary cut by tensor parallel; no more than a chunk of logits exists."""

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
        logits = shard.tokens * vocabulary * shard.element_bytes
        return (
            Gemm("head", shard.tokens, self.width, vocabulary, gradients_in_forward=True),
            # read for the sum of exponentials, read again for its gradient, which is written
            Elementwise("cross-entropy", 4 * logits, 0),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """Both gradients, which forward forms chunk by chunk (runtime/kernels/loss.py)."""
        element = self.width * shard.element_bytes
        return (
            Saved("gradient of hidden", shard.tokens * element),
            Saved("gradient of head", self.gradient_bytes(shard)),
        )

    def gradient_bytes(self, shard: Shard) -> Number:
        """Of the weight's gradient, which backward takes over from forward."""
        return self.vocabulary / shard.tensor * self.width * shard.element_bytes

    def recomputed(self, shard: Shard, recompute: Recompute) -> tuple[Kernel, ...]:
        return ()

    def scratch_bytes(self, shard: Shard) -> Number:
        """Beyond what is kept at its end: the head's gradient summed in fp32, beside a chunk of logits and of
        their gradients or rounded; in backward both gradients times that of the loss, beside themselves."""
        vocabulary, gradient = self.vocabulary / shard.tensor, self.gradient_bytes(shard)
        chunk = chunk_rows(shard.tokens, self.width, vocabulary) * vocabulary
        summed = vocabulary * self.width * LOGIT_BYTES
        both = gradient + shard.tokens * self.width * shard.element_bytes
        return np.maximum(summed + np.maximum(2 * chunk * shard.element_bytes - gradient, 0), both)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """Chunk by chunk of tokens the ranks agree on the largest logit, then on the sum of exponentials and
        the target's logit (runtime/parallel/vocabulary.py)."""
        size = shard.tokens * self.width * shard.element_bytes
        rows = chunk_rows(shard.tokens, self.width, self.vocabulary / shard.tensor)
        whole, rest = np.divmod(shard.tokens, rows)
        statistics = (
            Transfer(name, "tp", "all_reduce", numbers * tokens * LOGIT_BYTES, "forward", calls)
            for tokens, calls in ((rows, whole), (rest, np.where(rest > 0, 1, 0)))
            for name, numbers in (("largest logits", 1), ("sums of exponentials, targets' logits", 2))
        )
        return (
            Transfer("head input", "tp", "all_gather", size, "forward"),
            *statistics,
            Transfer("head input gradient", "tp", "reduce_scatter", size, "backward"),
        )

    def limits(self) -> tuple[Limit, ...]:
        return (Limit("tp", "vocabulary", self.vocabulary),)


def chunk_rows(tokens: Number, width: int, vocabulary: Number) -> Number:
    """Tokens whose logits exist at a time: a power of two (runtime/kernels/loss.py)."""
    target = np.maximum(tokens * width // vocabulary, 16)
    return np.minimum(2.0 ** np.ceil(np.log2(target)), np.maximum(tokens, 1))
