"""Router of a mixture of experts, with whatever balances its load (Kimi K3, 2.3.3; DeepSeek-V3, 2.1.2)."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from shipway.compiler.operators.base import (
    Elementwise,
    Gemm,
    Kernel,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
)
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Experts as ExpertsSchema

SCORE_BYTES = 4
"""Router logits and scores are fp32."""
INDEX_BYTES = 8
"""Expert indices are int64."""


@dataclass(frozen=True)
class Router(Operator):
    """Scores, top-k choice and mixture weights, in fp32, on the tokens sequence parallel leaves to a rank."""

    width: int
    """Width of what the router reads: the model's, or the latent."""
    dims: ExpertsSchema
    block: str = "router"

    @property
    def biased(self) -> bool:
        """Whether a balancing bias enters the choice."""
        return self.dims.balancing.kind in ("quantile", "bias")

    def parameters(self) -> tuple[Parameter, ...]:
        experts = self.dims.routed
        router = Parameter("weight", (experts, self.width), fp32=True)
        if not self.biased:
            return (router,)
        bias = Parameter("balance_bias", (experts,), optimizer="none", active_fraction=Fraction(0), fp32=True)
        return (router, bias)

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        tokens = shard.local_tokens
        scores = tokens * self.dims.routed * SCORE_BYTES
        return (
            Gemm("router", tokens, self.width, self.dims.routed),
            Elementwise("top-k", 6 * scores, 3 * scores, kernels=6),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        tokens = shard.local_tokens
        logits = Saved("router scores", tokens * self.dims.routed * SCORE_BYTES)
        chosen = Saved("chosen experts and weights", tokens * self.dims.active * (INDEX_BYTES + SCORE_BYTES))
        match recompute:
            case "none":
                return (Saved("input", tokens * self.width * shard.element_bytes), logits, chosen)
            case "selective":
                return (logits,)
            case "full":
                return ()

    def scratch_bytes(self, shard: Shard) -> Number:
        return 3 * shard.local_tokens * self.dims.routed * SCORE_BYTES
