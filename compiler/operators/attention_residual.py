"""Attention residuals: a softmax over depth in place of a sum (arXiv 2603.15031)."""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step, total
from shipway.compiler.operators.base import Elementwise, Kernel, Number, Operator, Parameter, Saved, Shard
from shipway.schemas.layout import Recompute


@frozen
class AttentionResidual(Operator):
    """One reading site: h = sum_i softmax_i(w . RMSNorm(v_i)) v_i over `sources` hidden states."""

    width: int
    sources: int
    """Hidden states read: the finished blocks and the running sum, or every earlier output."""
    block: str = "attention residuals"

    def parameters(self) -> tuple[Parameter, ...]:
        return (Parameter("query", (self.width,)), Parameter("norm.weight", (self.width,)))

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        state = shard.local_tokens * self.width * shard.element_bytes
        # Forward reads every source and writes one; backward reads them again and what came to them from
        # later readers, and writes their gradients.
        return (
            Elementwise("attention residual", (self.sources + 1) * state, (3 * self.sources + 1) * state),
        )

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        """The newest source: each is new at one site and owned by it (the kernel keeps all sources, and a
        logit and a reciprocal rms of each).

        plain: the sources in fp32, which below fp32 means a copy of every one of them.
        """
        tokens, sources = shard.local_tokens, self.sources
        newest = Saved("newest source", tokens * self.width * shard.element_bytes)
        match recompute:
            case "none" if shard.implementation == "fused":
                return (newest, Saved("logits and rstd", tokens * 2 * sources * 4))
            case "none":
                widened = 1 if shard.element_bytes == 4 else sources
                return (
                    Saved("sources, widened", tokens * self.width * 4 * widened),
                    Saved("logits, rstd and weights", tokens * 3 * sources * 4),
                )
            case _:
                return ()

    def backward(self, shard: Shard) -> tuple[Step, ...]:
        """Gradients of all sources, with those that are there, and of query and norm in fp32, by 16 rows.

        The norm behind it has handed its gradient over to the residual path already: it is here still.
        """
        row = shard.local_tokens * self.width
        state = row * shard.element_bytes
        kept = total(tensor.bytes for tensor in self.saved(shard, "none"))
        made = (self.sources + 1) * state + row / 16 * 4
        return (Step("attention residual", made, made + kept, weights=2 * self.width),)

    def scratch_bytes(self, shard: Shard) -> Number:
        return shard.local_tokens * self.width * 4


@frozen
class ResidualAdd(Operator):
    """x + f(x), or adding a sublayer's output to the running sum of its block."""

    width: int
    block: str = "residual"

    def parameters(self) -> tuple[Parameter, ...]:
        return ()

    def kernels(self, shard: Shard) -> tuple[Kernel, ...]:
        size = shard.local_tokens * self.width * shard.element_bytes
        return (Elementwise("residual", 3 * size, 3 * size),)

    def saved(self, shard: Shard, recompute: Recompute) -> tuple[Saved, ...]:
        return ()
