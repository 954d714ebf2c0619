"""What a softmax-attention core keeps and needs, whichever attention it serves.

fused: cuDNN or flash attention. plain: SDPA on the CPU, whose flash form wants one width and so pads
values to the keys' width.
"""

from __future__ import annotations

from shipway.compiler.frozen import frozen
from shipway.compiler.operators.backward import Step
from shipway.compiler.operators.base import Attention, Number, Saved, Shard


@frozen
class SoftmaxCore:
    """`heads` query heads of `key_width` over `kv_heads` key heads, values of `value_width`."""

    heads: int
    kv_heads: int
    key_width: int
    value_width: int

    def kernel(self, shard: Shard) -> Attention:
        """Causal attention of this rank's queries over the whole context."""
        return Attention(
            "attention",
            shard.sequences,
            self.heads / shard.tensor,
            shard.context / shard.context_parallel,
            shard.context,
            self.key_width,
            self.value_width,
        )

    def padded(self, shard: Shard) -> bool:
        """Whether values and outputs are padded to the keys' width."""
        return shard.implementation == "plain" and self.value_width < self.key_width

    def query_and_output(self, shard: Shard) -> tuple[Saved, ...]:
        """Query, output and fp32 log-sum-exp; a padded output is cut to its width by a copy that the next
        product owns."""
        rows = shard.tokens * self.heads / shard.tensor
        width = self.key_width if self.padded(shard) else self.value_width
        return (
            Saved("query", rows * self.key_width * shard.element_bytes),
            *self.output(shard, rows * width * shard.element_bytes),
        )

    def output(self, shard: Shard, output_bytes: Number) -> tuple[Saved, ...]:
        """Output and fp32 log-sum-exp."""
        rows = shard.tokens * self.heads / shard.tensor
        return (Saved("core output", output_bytes), Saved("log-sum-exp", rows * 4))

    def products(self, shard: Shard) -> tuple[Saved, ...]:
        """What selective recomputation keeps of the core."""
        rows = shard.tokens * self.heads / shard.tensor
        width = self.key_width if self.padded(shard) else self.value_width
        return self.output(shard, rows * width * shard.element_bytes)

    def backward(self, shard: Shard) -> Step:
        """Gradients of query, key and value from that of the output; frees these alone of what is kept."""
        rows = shard.tokens * self.heads / shard.tensor
        width = self.key_width if self.padded(shard) else self.value_width
        kept = sum(tensor.bytes for tensor in self.query_and_output(shard))
        return Step("attention", self.scratch_bytes(shard), rows * width * shard.element_bytes + kept)

    def scratch_bytes(self, shard: Shard) -> Number:
        """Gradients of query, keys and values while the core's backward runs."""
        keys = shard.sequences * shard.context * self.kv_heads * (self.key_width + self.value_width)
        return (shard.tokens * self.heads * self.key_width + keys) / shard.tensor * shard.element_bytes
