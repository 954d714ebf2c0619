"""Multi-token prediction: what stands before its extra layer (DeepSeek-V3, arXiv 2412.19437, 2.2)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.base import (
    Elementwise,
    Kernel,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.embedding import TOKEN_BYTES, embedding_transfers
from shipway.compiler.operators.linear import gemm, norm_weight, weight
from shipway.compiler.operators.norm import norm_kernel, norm_saved
from shipway.schemas.layout import Recompute


@frozen
class PredictionInput(Operator):
    """projection([norm(hidden), norm(embedding of the next token)]), 2D to D."""

    width: int
    block: str = "multi-token prediction"

    def parameters(self) -> tuple[Parameter, ...]:
        return (
            norm_weight("hidden_norm", self.width),
            norm_weight("embedding_norm", self.width),
            weight("projection", self.width, 2 * self.width),
        )

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens = shard.local_tokens
        joined = 2 * tokens * self.width * shard.element_bytes
        return (
            norm_kernel("hidden and embedding norms", 2 * tokens, self.width, shard),
            Elementwise("join", 2 * joined, 2 * joined),
            gemm("projection", tokens, 2 * self.width, self.width),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """Recomputation wraps the model's own layers, so here it changes nothing."""
        tokens = shard.local_tokens
        state = tokens * self.width * shard.element_bytes
        norms = norm_saved("hidden and embedding norms", 2 * tokens, self.width, shard)
        return (
            Saved("tokens", shard.tokens * TOKEN_BYTES),
            # The final norm, or that of the depth before, keeps the hidden states already.
            Saved(norms[0].name, norms[0].bytes - state),
            *norms[1:],
            Saved("joined", 2 * state),
        )

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """The next token's embedding is looked up in the shared table."""
        return embedding_transfers(self.width, shard)

    def scratch_bytes(self, shard: Shard) -> Number:
        return 2 * shard.local_tokens * self.width * shard.element_bytes
