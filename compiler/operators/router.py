"""Router of a mixture of experts, with whatever balances its load (Kimi K3, 2.3.3; DeepSeek-V3, 2.1.2)."""

from __future__ import annotations

from fractions import Fraction

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import (
    Elementwise,
    Gemm,
    Kernel,
    Number,
    Operator,
    Parameter,
    Saved,
    Shard,
    Transfer,
)
from shipway.compiler.operators.linear import gradient_sum
from shipway.schemas.layout import Recompute
from shipway.schemas.model import Experts as ExpertsSchema

SCORE_BYTES = 4
"""Router logits and scores are fp32."""
INDEX_BYTES = 8
"""Expert indices are int64."""
PARTS = 3
"""In bf16, that an fp32 weight or gradient is the sum of (runtime/kernels/split_product.py)."""


@frozen
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
            Gemm("router", tokens, self.width, self.dims.routed, parts=PARTS),
            Elementwise("top-k", 6 * scores, 3 * scores, kernels=6),
            gradient_sum(2, tokens, self.width, shard),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """The input as it comes, scores, and what leads from them to the mixture weights."""
        tokens, dims = shard.local_tokens, self.dims
        scores = Saved("scores", tokens * dims.routed * SCORE_BYTES)
        match recompute:
            case "none":
                weights = tokens * dims.active * SCORE_BYTES
                margin = 1 if dims.balancing.kind == "quantile" else 0
                return (
                    Saved("input", tokens * self.width * shard.element_bytes),
                    scores,
                    Saved("chosen experts", tokens * (dims.active + margin) * INDEX_BYTES),
                    Saved("chosen scores", weights + tokens * SCORE_BYTES if dims.renormalize else 0),
                    Saved("mixture weights", weights),
                    *self._saved_auxiliary(shard),
                )
            case "selective":
                return (scores,)
            case "full":
                return ()

    def _saved_auxiliary(self, shard: Shard) -> tuple[Saved, ...]:
        if self.dims.balancing.kind != "auxiliary":
            return ()
        return (Saved("sum of scores", shard.local_tokens * SCORE_BYTES),)

    def transfers(self, shard: Shard) -> tuple[Transfer, ...]:
        """The auxiliary loss is of whole rows: choices, scores and tokens of each are summed over the ranks
        that share it; only slices, which count different tokens, sum the gradient too."""
        if self.dims.balancing.kind != "auxiliary":
            return ()
        size = shard.sequences * (2 * self.dims.routed + 1) * SCORE_BYTES
        return (
            Transfer("balancing statistics", "tp", "all_reduce", size, "forward"),
            Transfer("balancing statistics of slices", "cp", "all_reduce", size, "forward"),
            Transfer("gradient of balancing statistics", "cp", "all_reduce", size, "backward"),
        )

    def buffer_bytes(self) -> int:
        """Counters between balancing updates: the load, and the histogram of margins."""
        balancing = self.dims.balancing
        margins = balancing.bins if balancing.kind == "quantile" and balancing.estimator == "histogram" else 0
        return self.dims.routed * (1 + margins) * INDEX_BYTES

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """From the mixture weights' gradients by the scores' to the input's, mostly added to another.

        In bf16 the product's parts stand beside what they are joined to (runtime/kernels/split_product.py).
        """
        scores = shard.local_tokens * self.dims.routed * SCORE_BYTES
        weights = shard.local_tokens * self.dims.active * SCORE_BYTES
        size = shard.local_tokens * self.width * shard.element_bytes
        kept = total(tensor.bytes for tensor in self.saved(shard, "none"))
        parts = 0 if shard.element_bytes == SCORE_BYTES else 2 * PARTS * scores / 2
        return (
            # The choices' gradients are scattered over all experts.
            Step("scores", 2 * scores, scores + weights),
            Step("activation", scores, scores),
            Step(
                "router",
                parts + size,
                parts + scores + kept - self._read_behind(shard) + (size if self._adds else 0),
                weights=self.width * self.dims.routed,
            ),
        )

    @property
    def reduced_apart(self) -> bool:
        return True

    @property
    def _adds(self) -> bool:
        """Whether something has made a gradient of its input before."""
        return self.dims.latent_width is None or self.dims.router_input == "latent" or self.dims.shared > 0

    def _read_behind(self, shard: Shard) -> Number:
        """Bytes of its input that a projection to the latent width reads too, after it in backward."""
        latent = self.dims.latent_width is not None and self.dims.router_input == "hidden"
        return shard.local_tokens * self.width * shard.element_bytes if latent else 0

    def scratch_bytes(self, shard: Shard) -> Number:
        """Three sets of scores, or one beside the products of its parts."""
        sets = 3 if shard.element_bytes == SCORE_BYTES else 1 + PARTS
        return shard.local_tokens * sets * self.dims.routed * SCORE_BYTES
